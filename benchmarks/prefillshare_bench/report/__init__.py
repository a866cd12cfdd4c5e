"""From a folder of measured points to the tables, plots and JSON files of the evaluation."""
