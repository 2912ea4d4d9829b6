"""Reads a finished run and shows it: page, figures, tables, claims. Never loads a model."""

from deltalens.report.claims import Claim, claims_for
from deltalens.report.compare import compare_report
from deltalens.report.figures import write_figures
from deltalens.report.html import write_report
from deltalens.report.notebook import notebook_html
from deltalens.report.points import at_point, parse_point
from deltalens.report.sweep import sweep_table
from deltalens.report.sweep_figures import write_sweep_figures
from deltalens.report.tables import claims_table, summary_table

__all__ = [
    "Claim",
    "at_point",
    "claims_for",
    "claims_table",
    "compare_report",
    "notebook_html",
    "parse_point",
    "summary_table",
    "sweep_table",
    "write_figures",
    "write_report",
    "write_sweep_figures",
]
