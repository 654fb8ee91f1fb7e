"""Several engines of one model behind one client: who gets which request, and what becomes of it when one dies.

No torch here.
"""
