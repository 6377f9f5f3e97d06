"""Which files are run in a process of their own."""

OWN_PROCESS = frozenset({"test_gpu_cupti.py", "test_placement.py"})
"""Their tests need CUPTI, which serves one in a process: after ``torch.profiler``, say, it is not to be had."""
