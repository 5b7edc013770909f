"""Model parallel by stages, as numbers and lists: the cut, the schedules, their time. Nothing here runs anything."""
