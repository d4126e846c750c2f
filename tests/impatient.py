"""MonoBeast, but test games count as stuck after 30 s without a step.

The log says it if no game has ended for two seconds.
"""

import sys

if __name__ == "__main__":
    from torchbeast import monobeast
    from torchbeast.extras import evaluator
    from torchbeast.play import evaluate

    evaluate.QUIET_SECONDS = 2.0
    evaluate.START_SECONDS = evaluator.STEP_SECONDS = 30.0
    sys.exit(monobeast.main())
