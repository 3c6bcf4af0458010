"""How is a step done where nobody waits? A server with the parameters, and workers that come and go (docs/async.md).

``omni`` is what the user sees, ``engine`` and ``loader`` run in a worker, ``process``, ``server``, ``owner`` and
``planning`` in the server; ``wire`` and ``layout`` are what travels between them.
"""
