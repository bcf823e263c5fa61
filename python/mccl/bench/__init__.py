"""``mccl bench``: collectives of MCCL and of other libraries, side by side in one run. Imports no torch.

* Each library has processes of its own, n each (`team`). They take turns, a round of calls each (A B C A B C
  ...), so that what else the machine does meets all of them. Who is not measured sleeps.
* All ranks begin a call together: they line up at counters in a shared page (`lineup`), not at a library's
  barrier. The time of a call is that of its slowest rank: the largest of the ranks' own durations.
* All TCP sockets use the same congestion control. C libraries are measured in C (bench/worker.c), the others
  through torch with one thread (`rank`).
* Before each call the buffers are filled, after it every element is compared: `wrong` counts what differs.
"""
