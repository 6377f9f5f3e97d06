"""Where compilers and tuners keep their results between processes: finding, looking at, and pinning those places.

Nothing here imports a runtime or touches a device: variables are read, and of runtimes that this process has imported
already their live settings.
"""
