"""Training from the first step to a resumable, recorded run. In: a config, a model, data. Out: a folder.

`run.train` is the loop; `config` is what can be asked for; `checkpoint` is what a run is made of between two steps.
"""
