"""Sessions in processes of their own: one per device, fed through shared memory.

session_pool    what jobs call
supervisor      the one thread that watches pipes and processes
ledger          which request is where: bookkeeping without processes, clock or memory
placement       which model goes to which device: a function of measured figures
devices         what "all" means on this machine
workplaces      environment, threads and processors of each worker
process         starting and ending a worker
worker          what runs in it
wire            frames of 64 bytes, both ways
tensor_headers  what says how the bytes in shared memory are to be read
arena           blocks of shared memory, owned by the pool's process alone
"""
