"""Sessions in processes of their own: one per device, fed through shared memory.

session_pool    what jobs call
calls           what a pool does beyond a single request, whatever its workers are
numbers         what counts and seconds a pool may be given
requests        names, types and layout of what a caller hands over, checked
exchange        where callers and workers meet: requests, memory and the ledger, under one lock
gate            whether a request may come in, and its turn
futures         what callers wait on
ledger          which request is where: bookkeeping without processes, clock or memory
arena           blocks of shared memory, owned by the pool's process alone
segments        shared memory itself
leases          arrays on blocks, which give them back
supervisor      the one thread that watches pipes and processes
crew            workers as the supervisor knows them, and what they are said to be
outbox          what is to be written to a worker, put down under the lock and written without
process         starting and ending a worker
worker          what runs in it
served_model    a model in a worker: from tensors in shared memory to answers there
served_session  a session of it
session_runner  how a session is run, and which one for which shapes
wire            frames of 64 bytes, both ways
tensor_headers  what says how the bytes in shared memory are to be read
placement       which model goes to which device: a function of measured figures
loads           those figures, from a bundle's manifest
devices         what "all" means on this machine
workplaces      environment, threads and processors of each worker
driving         many requests, each answer checked: `ortprep serve-check`
"""
