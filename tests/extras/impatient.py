"""MonoBeast, but test games count as stuck after 30 s without a step."""

import sys

if __name__ == "__main__":
    from torchbeast import monobeast
    from torchbeast.extras import evaluator
    from torchbeast.extras.play import games

    games.START_SECONDS = evaluator.STEP_SECONDS = 30.0
    sys.exit(monobeast.main())
