"""Sessions in processes of their own: one per device, fed with packets.

session_pool  what jobs call
config        settings of a pool, and the workers that follow from them
service       what becomes of a request
dispatch      who has which lane, and who waits for one
lane          one connection to a worker: a request, and its answer
worker        a worker across restarts of its process: the thread that watches it
process       a worker's process: how it starts, what it says, how it ends
template      a process that is forked for each worker
report        what workers say of themselves, and what a pool reports
worker_main   what runs in a worker
"""
