"""Small multi-agent programs, each written as people write them, with its breaks as `BREAKS`.

`BREAKS` has, for each layout, the calls that break and why. `ANSWERS` is what the models say, in
order, or by role. `main` is the program; the environment tells its clients where to send to.
"""
