"""What every run watches about its attention: telemetry, early warning, guard and captures."""
