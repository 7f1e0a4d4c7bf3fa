"""The test suite: unit, families, parallel, upstream, style. A package, so that ranks started by a test can import it."""
