"""Sessions in processes of their own: one per device, fed through packets and shared memory.

session_pool    what jobs call
config          settings of a pool
base_pool       what a pool does beyond a single request, whatever its workers are
broker          how requests come in
request_table   requests that are not answered yet, and what becomes of them
admission       whether a request may come in, and its turn
futures         what callers wait on
ledger          which request is where: bookkeeping without processes, clock or memory
messages        packets between the pool and its workers
channel         the pool's end of a worker's socket
answers         from a worker's answer to arrays, checked
memory          the memory file, and how a region of it is divided
pool_memory     what of it is in use
supervisor      the one thread that watches a pool
worker_manager  workers, started, listened to, and started again
worker_state    a worker across restarts of its process
process         a worker's process
wakeup          what wakes the supervisor
worker          what runs in a worker
served_model    a model in a worker: from the tensors of a request to an answer
stats           events and statistics of workers
"""
