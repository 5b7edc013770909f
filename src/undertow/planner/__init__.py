"""The planner: a Program, its costs and a budget in bytes go in; the Program that fits comes out, with its gap."""
