"""Runs code that the model wrote: `pool.shared().run(code)` for a program, `pool.shared().session()` for a Python REPL."""
