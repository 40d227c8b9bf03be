"""Files that run in the interpreter of vLLM or SGLang, which may lack Roost: they import the standard library only."""
