"""What goes over the bridge. The layout is the C++ core's (``native/include/nitro/ring_layout.hpp``)."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nitro import _native

Messages: TypeAlias = npt.NDArray[np.void]
"""``[M]``, of dtype :data:`MESSAGE`."""

MESSAGE: np.dtype[np.void] = _native.MESSAGE
"""How many tokens of one request a worker's scores would keep, with all that the scheduler needs to judge the answer.

    ===============  ======  ========================================================================================
    ``request``      uint64  the scheduler's number of the request, never used again for another one
    ``step``         uint64  the engine step whose cache was scored
    ``run``          uint32  times that the request had been started again (preempted); its epochs begin anew then
    ``epoch``        uint32  evictions applied in this run before that step
    ``logical_len``  int32   tokens computed before that step
    ``physical_len`` int32   slots that were scored, ``<= logical_len``
    ``keep``         int32   how many of them would stay, ``0 <= keep <= physical_len``
    ``flags``        uint32  none is defined yet: 0
    ===============  ======  ========================================================================================
"""
