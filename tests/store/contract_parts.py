"""A part of the store contract, for stores composed of parts that pass the whole contract."""

from __future__ import annotations

from midstream.testing.store_contract import StoreContract


class ContractParts:
    """One test for each kind of stored value, and for the end of a node, a session or a range of records."""

    test_a_body = StoreContract.test_a_body_comes_back_byte_for_byte
    test_reading_after_any_position = (
        StoreContract.test_reading_goes_on_after_any_position_and_stops_at_the_limit
    )
    test_pruning = StoreContract.test_pruned_records_are_replaced_and_later_records_stay
    test_links = StoreContract.test_links_are_stored_with_their_records
    test_a_mark = StoreContract.test_a_mark_is_written_with_its_append
    test_a_blob = StoreContract.test_a_blob_comes_back_byte_for_byte_and_belongs_to_its_session
    test_a_seal = StoreContract.test_a_seal_is_kept_with_its_append_unless_the_store_has_its_own
    test_an_entry = StoreContract.test_an_entry_is_replaced_only_at_the_version_that_was_read
    test_a_namespace = StoreContract.test_a_namespace_is_listed_last_written_first_and_apart_from_others
    test_a_forwarded_command = StoreContract.test_a_command_reaches_the_node_and_its_answer_the_sender
    test_a_command_of_a_dead_node = StoreContract.test_a_command_that_a_dead_node_left_goes_to_the_next_node
    test_a_takeover = StoreContract.test_a_dead_nodes_sessions_are_taken_over_with_all_they_hold
    test_competing_stores = StoreContract.test_competing_stores_write_one_gapless_journal
    test_deletion = StoreContract.test_a_deleted_session_leaves_nothing
    test_a_recreated_session = StoreContract.test_older_epochs_cannot_append_to_a_recreated_session
