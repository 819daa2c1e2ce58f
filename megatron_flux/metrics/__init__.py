"""What a run recorded, and how people look at it: records (JSONL), summary, table, report, wandb mirror.

The JSONL is the record; everything else is made from it or mirrors it. plotly, jinja2 and wandb are imported only
inside the functions that use them, so that a training process that only records pays for none of them. To be read in
this order: ``schema`` (what a record holds), ``recorder``, ``summary``, ``table``; then ``watch``, ``report/``,
``regression``, ``wandb_mirror``, ``wandb_online``.

Contents of a run folder::

    config.json                 what was asked for: any JSON object
    baseline/metrics.jsonl      one record per iteration (metrics.schema), stock Megatron
    flux/metrics.jsonl          the same, patched
    summary.json                metrics.summary
    report.html                 metrics.report
    ended.json                  how the run ended, and at which step: run.folder
"""
