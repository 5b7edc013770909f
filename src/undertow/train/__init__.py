"""Training from the first step to a resumable, recorded run. In: a config, a model, data. Out: a folder.

`run.train` is the loop; `config` has the options; `checkpoint` is the state of a run between two steps.
"""
