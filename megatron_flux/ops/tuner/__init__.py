"""The tuner: finds which backend and plan run a call fastest, in the training's own calls, and stores the answer.

Words: *m* is a call's number of rows. A *bucket* is a range of m by a factor of
:data:`~megatron_flux.ops.tuner.tuner.BUCKET`. An *entry* is what the file says of a call: backend and plan.

A call is decided by the first of these that has an answer (:mod:`~megatron_flux.ops.tuner.tuner`)
    1. What this process knows, then the JSON file (:mod:`~megatron_flux.ops.tuner.cache`), by a key of all that speed
       depends on (:mod:`~megatron_flux.ops.tuner.keys`). If the file has nothing in the bucket: the plans that ship
       with the package (:mod:`~megatron_flux.ops.tuner.shipped`). Until the kernels of such a plan are compiled, calls
       run the plan of the nearest m whose kernels are, or stock.
    2. The entry of the nearest m of the bucket, if this call can run its plan, with tiles of the width that takes the
       fewest rounds (:func:`~megatron_flux.ops.kernel_config.in_fewest_rounds`).
    3. A trial (:mod:`~megatron_flux.ops.tuner.trial`): calls of the bucket run the candidates in turn.
    4. With ``MEGATRON_FLUX_TUNE=off`` known plans run from the first call on. Other calls run stock, counted as
       degraded.

    ``tune``, ``tune_model`` and calls that CUDA graphs capture make calls until the trial of exactly this m is over
    (:mod:`~megatron_flux.ops.tuner.alone`). ``tune`` measures all, also calls whose plan ships.

Candidates (:mod:`~megatron_flux.ops.tuner.candidates`)
    ``reference``, which others must beat by 1 %, and the likeliest fused plans by rule, or all on request. If another m
    of the call was tried: what was close there. Over links that send chunks: ``reference`` and ``chunked``, also in 8
    bits if the call allows it; plain gathers are tried there, too.

Agreement
    All ranks of a group decide together: the first rank's setting, file and list count, and only its file is written.
    Trials exchange times on the hosts. A call whose plan is known asks nobody; nor does a further m of a bucket.

Limits
    * A trial takes some forty calls for three candidates, sixty if the host is the bound. If the process ends before,
      the trial is lost: a job that resumes begins it again.
    * A stored plan runs in every training. So one that was found with the GPU as the bound, as by ``tune``, may be
      slower than stock where the host is the bound.
    * In a CUDA graph's capture nothing is tried, made or read. A call that has not run in this process, or has no
      workspace for graphs, runs ``reference``, with a warning. Calls that will be captured use the entry of eager ones
      if they have none of their own, except all-reduces.

Hazards
    * Candidates may differ in the last bits of a sum. So may two trainings, during a trial.
    * An earlier call that was interrupted must not pass for a candidate that cannot run: a first turn looks for one.
"""
