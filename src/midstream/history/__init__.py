"""Messages of any provider: read, check, repair, convert. Pure; needs msgspec only."""
