"""Files that run in the interpreter of vLLM or SGLang, which need not have Roost: standard library only."""
