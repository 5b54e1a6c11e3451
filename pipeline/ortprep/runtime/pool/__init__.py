"""Sessions in processes of their own: one per device, fed through packets and shared memory.

session_pool    what jobs call
config          settings of a pool
broker          how requests come in
request_table   requests that are not answered yet, what becomes of them, and the lock of the books
slots           a slot is a request's permit, memory and entry in the books: bookkeeping alone
memory          regions of the memory file
messages        packets between the pool and its workers
supervisor      the one thread that watches a pool
worker_manager  workers, started, listened to, and started again
packet_channel  the pool's end of a worker's socket
worker_state    a worker across restarts, and what a pool reports of it: events and statistics
worker_process  a worker's process: its job, how it is started and ended
worker_main     what runs in a worker
served_model    a model in a worker: from the tensors of a request to an answer
"""
