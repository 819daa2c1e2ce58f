"""The tuner: finds which backend and plan run a call fastest, in the calls of the training, and keeps the answer.

A call is decided by the first of these (:mod:`~megatron_flux.ops.tuner.tuner`)
    1. This process, then the JSON file (:mod:`~megatron_flux.ops.tuner.cache`), by a key of all that its speed depends
       on (:mod:`~megatron_flux.ops.tuner.keys`). Where the file has nothing in the bucket of m, what ships with the
       package (:mod:`~megatron_flux.ops.tuner.shipped`). Until the kernels of such a plan are compiled, calls run
       that of the nearest m which has them, or stock.
    2. The nearest m of the same bucket, where this call can run its plan, with tiles of the width that takes the fewest
       rounds (:func:`~megatron_flux.ops.kernel_config.in_fewest_rounds`). A bucket is a factor of
       :data:`~megatron_flux.ops.tuner.tuner.BUCKET` wide.
    3. A trial (:mod:`~megatron_flux.ops.tuner.trial`): calls of the bucket run the candidates in turn. Until it is
       over they run the fastest so far, at first what was chosen in another bucket, or stock.
    4. ``MEGATRON_FLUX_TUNE=off``: what is known runs at once, else stock, counted as degraded.

    ``tune``, ``tune_model`` and calls that CUDA graphs capture do not wait for a training: they make calls until the
    trial of this very m is over (:mod:`~megatron_flux.ops.tuner.alone`). ``tune`` measures all, whatever ships.

Candidates (:mod:`~megatron_flux.ops.tuner.candidates`)
    ``reference``, which others must beat by 1 %, and the likeliest fused plans by rule, or all where these are asked
    for. For another m of a call that was tried, what was close there. Where transfers go by chunks: ``reference`` and
    ``chunked``, with the 8-bit wire format that the call allows; plain gathers are tried there, too.

Agreement
    All ranks of a group decide together: the first rank's setting, file and list count, and its file alone is written.
    Which candidate a call runs follows from the number of calls. Once a round ranks exchange their times on the host,
    and make further calls meanwhile; a time that one of them lacks counts on none. A call whose plan is known
    asks nobody, nor does a further m of a bucket. A candidate that fails on all ranks is dropped with a log line; one
    that fails on some is an error on all, since what the others have enqueued waits.

Limits
    * A trial takes some forty calls for three candidates, sixty where the host is the bound. One that does not get so
      many goes on for ever, and is lost with the process: a job that resumes begins it again.
    * Where the host is the bound, times tell little of the candidates: the likeliest one runs, unless stock or another
      takes the host clearly less, and is not kept in the file (:mod:`~megatron_flux.ops.tuner.host_bound`).
    * A plan that is kept runs in every training. So one that was found where the GPU was the bound, as ``tune`` does,
      may be slower than stock where the host is.
    * In a CUDA graph's capture nothing is tried, made or read: a call that has not run in this process, or has no
      workspace of graphs, takes ``reference``, with a warning. Calls that will be captured take the entry of eager ones
      where they have none, but for an all-reduce.
    * What is remembered is bounded (:class:`~megatron_flux.comm.group_state.Cache`); nothing of it holds the group.

Hazards
    * Candidates may differ in the last bits of a sum: so may two trainings, while one is tried.
    * An earlier call that was broken off must not pass for a candidate that cannot run: a first turn looks for one.
"""
