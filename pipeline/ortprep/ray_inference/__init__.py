"""Inference with bundles on Ray: `BundleDeployment` for Ray Serve.

config              `ServeConfig`, and the options of Serve that follow from it
serve_file          the Serve config file that `ortprep serve-config` writes
deployment          what runs in a replica, and Serve applications of it
http_api            the Open Inference Protocol over HTTP; the bearer token and the budget of clients
inference_protocol  its requests and responses, as functions of bytes
pinning             an alias becomes the version it names now; replicas may follow it
device              the device that Ray gave a replica

Nodes need nothing of the build.
"""
