import pytest

pytest.register_assert_rewrite("midstream.testing.store_contract")
