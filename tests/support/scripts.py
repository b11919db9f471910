"""Scripts whose output and end tell whether they were run as plain Python runs them."""

from __future__ import annotations

SCRIPTS = {
    "names": "import sys\nprint(__name__, __file__, sys.argv, sys.path[0], __package__, __spec__, __doc__)",
    "globals": "print(sorted(globals()), __annotations__, __builtins__, type(__loader__))",
    "main module": "import __main__\nx = 1\nprint(__main__.x, __main__.__dict__ is globals())",
    "docstring": '"""Mine."""\nprint(__doc__)',
    "no future": "def f(x: undefined_name): pass",
    "exit code": "import sys\nsys.exit(3)",
    "exit text": "raise SystemExit('bye')",
    "exit none": "import sys\nsys.exit()",
    "atexit": "import atexit, sys\natexit.register(lambda: print('at exit', sys.argv))\nraise KeyError('x')",
    "exception": "def f():\n    1 / 0\nf()",
    "chained": "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('b') from error",
    "group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "syntax": "x = = 1",
    "interrupt": "raise KeyboardInterrupt",
    "own hook": "import sys\nsys.excepthook = lambda *a: print('mine', a[0], a[2].tb_lineno)\nraise ValueError",
    "bad str": "class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E",
    "encoding": "# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))",
    "spawn": "import multiprocessing as mp\ndef f(x):\n    return x + 1\nif __name__ == '__main__':\n"
    "    with mp.get_context('spawn').Pool(1) as p:\n        print(p.map(f, [1]))",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))), pickle.dumps(A()))",
}
