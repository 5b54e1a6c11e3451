"""What runs where on a machine, decided before anything is started.

devices      which devices there are, what "all" means, and variables, threads and processors of each process
assignment   what a bundle's model takes of a device, and which model goes to which device
"""
