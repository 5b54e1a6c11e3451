"""Bundles served by the nodes of a Ray cluster, which have nothing of the build.

ray_session_pool   what jobs call
exchange           where callers and actors meet: requests and the ledger, under one lock
inputs             a request's arrays until it is answered
packing            which requests go into one actor call
steward            the one thread that workers are changed on
lives              births and deaths of actors, and what they say in between
coverage           that somebody serves every model
scouting           the nodes that join and leave
checks             golden samples, run again
roster             all actors, and what other threads ask of them
hands              an actor as the steward knows it
session_actor      what runs on a node: a process with the sessions of its models
opened_model       a model in such a process
survey             what a node says of the bundles and of itself, once it has pulled them
nodes              the cluster's nodes, as Ray lists them
fleet              what of them is used, and what for
posts              the actors that a node gets, and what each reserves of it
placing            which model goes to which node
pinning            an alias becomes the version it names now, so that all nodes serve the same
ray_errors         what Ray raises, in this package's words
predictor          `OnnxPredictor`, for Ray Data
arguments          what its columns and constants may be
bound_often        a session whose inputs are bound, for batches of changing length
batching           rows to the shapes that a model takes, and back
"""
