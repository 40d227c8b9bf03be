"""Processes forked from one that has run nothing but imports of torch: those take seconds in every new interpreter."""

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["roost.learner.learner", "roost.torch_engine.engine", "roost.torch_engine.server"])
