def main() -> int:
    raise SystemExit(2)
