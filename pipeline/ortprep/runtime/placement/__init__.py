"""What runs where on a machine, decided before anything is started.

devices      which devices there are, and what "all" means
model_load   what a bundle's model takes of a device, from its manifest
assignment   which model goes to which device: a function of those figures
environment  variables, threads and processors of each process
"""
