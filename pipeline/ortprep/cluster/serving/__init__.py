"""Bundles served on a Ray cluster by Ray Serve; nodes need nothing of the build.

config              `ServeConfig`, and the options of Serve that follow from it
application         bundles as a Serve application
serve_file          the Serve config file that `ortprep serve-config` writes
deployment          what runs in a replica
admission           the bearer token of clients, and room for the bodies of their requests
http_api            the Open Inference Protocol over HTTP, as a replica answers it
inference_protocol  its requests and responses, as functions of bytes
pinning             an alias becomes the version it names now; replicas may follow it
"""
