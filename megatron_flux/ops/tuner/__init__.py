"""The tuner: measures once per call which backend and plan is fastest, and caches the answer.

Guarantee: a tuned call was never slower than stock's in the measurement. ``reference`` is always a candidate, and taken
unless another one wins by 1 %.

How it works (:mod:`~megatron_flux.ops.tuner.tuner`)
    1. Look the call up: in this process, then in the JSON file (:mod:`~megatron_flux.ops.tuner.cache`), by a key of all
       that its speed depends on (:mod:`~megatron_flux.ops.tuner.keys`).
    2. Where m changes from call to call, take the plan of the nearest m (below).
    3. Measure (:mod:`~megatron_flux.ops.tuner.measure`): bursts in interleaved rounds leave the candidates that are
       about as fast as the fastest; of these the one wins that is fastest by itself, once the GPU has settled at its
       power limit (:mod:`megatron_flux.ops.timing` says why). Times are the slowest rank's.

Candidates
    ``reference`` and fused plans: those that the shipped plans suggest (:mod:`ops.shipped_plans`) and the one chosen by
    rule, three compilations at most. Where nothing ships for the call, or ``MEGATRON_FLUX_TUNE`` is ``full``, all of
    :func:`ops.kernel_config.candidates`. An entry says which list it is from; one of a short list does not count where
    the full one is asked for. Where transfers go by chunks (a ``host`` link, or ``p2p`` where that was asked for):
    ``reference`` and ``chunked``, with the 8-bit wire format that the call allows; plain gathers are tuned, too.

Agreement
    All ranks of a group decide together: times are reduced by maximum, and the first rank reads the file, lists the
    candidates and alone writes. A few collectives per new call, none after. A candidate that fails on all ranks is
    dropped with a log line; one that fails on some is an error on all, since what the others have enqueued waits.

Limits
    * Time: ``MEGATRON_FLUX_TUNE_SECONDS`` per call (default 30), after which no candidate is compiled, and after twice
      as long none is measured once more. 0 never measures: ``reference``, or the plan that ships for the very call, GPU
      and NCCL without multicast, where that has saved 3 % of reference's time.
    * During CUDA-graph capture nothing is measured: a call that is new then takes ``reference`` and is logged. Calls
      that will be captured (:mod:`megatron_flux.ops.cuda_graphs`) take the entry of eager ones; where there is none
      they are measured in their own mode, with a handshake for each, and the entry holds for such calls alone.
    * m that changes (packed sequences): :data:`~tuner.MOST_M` values of it are measured; each further one runs as the
      nearest of those, which is logged once. A decode step's gemm_all_reduce (up to :data:`~keys.LONG_M` rows) is not
      measured where there is an entry, in the file too, for an m within a factor of two: it runs that, or stock where
      stock is the entry on either side. :meth:`~tuner.Tuner.decide` measures, whatever there is.
"""
