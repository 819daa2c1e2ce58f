"""Record runs and show them: records (JSONL), summary, table, report, wandb mirror.

The JSONL is the record; everything else is made from it or mirrors it. plotly, jinja2 and wandb are imported only
inside the functions that use them: a training process that only records pays for none of them.

Contents of a run folder::

    config.json                 the requested configuration: any JSON object
    baseline/metrics.jsonl      one record per step (metrics.schema), stock Megatron
    flux/metrics.jsonl          the same, patched
    summary.json                metrics.summary
    report.html                 metrics.report
    ended.json                  how the run ended, and at which step: run.folder
"""
