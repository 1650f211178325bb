"""RQ seen from the worker: the only package that touches RQ's worker internals (pinned to rq 3.0).

It keeps RQ's own bookkeeping right, so that `rq info`, the dashboards and the registries tell the truth, and it
leaves out what a queue must not be able to ask of a worker: no callback or function is imported, nothing is unpickled.
"""
