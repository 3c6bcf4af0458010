"""How is a step done where nobody waits? A server with the parameters, and workers that come and go (docs/async.md).

In a worker: ``omni`` is what the user sees, ``engine`` drives the loop, ``loader`` makes batches of leases, ``tensors``
holds the model, ``steps`` notes what was done. In the server: ``process`` starts it and lets workers in, ``server``
answers them, ``training`` uses their gradients, ``room`` knows who is here (``members``), ``owner`` has parameters and
optimizer, ``planning`` the batches, ``epochs`` the samples, ``meetings`` what is done together, ``journal`` the events.
Between them: ``wire``, ``layout``, and ``shared`` memory.
"""
