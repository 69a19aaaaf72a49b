"""The waiting room: bounded in bytes, for all and for each owner, and in time; first come first out, and nobody is forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from medha.routing.waiting_room import Guest, WaitingRoom


def test_there_is_room_for_so_many_bytes_and_those_of_who_has_left_are_free() -> None:
    room = WaitingRoom(100, 100, 60.0)
    assert room.enter(Guest("a", "m", "me", 60, 0.0)) is None
    assert room.enter(Guest("b", "m", "me", 41, 1.0)) == "full"
    assert room.enter(Guest("c", "n", "me", 40, 1.0)) is None
    assert (room.held_bytes, room.by_model()) == (100, {"m": 1, "n": 1})
    room.leave("a")
    room.leave("a")
    assert room.held_bytes == 40
    assert room.enter(Guest("b", "m", "me", 41, 2.0)) is None


def test_one_owner_leaves_a_part_of_the_room_to_others_and_its_own_requests_make_room_for_it() -> None:
    room = WaitingRoom(100, 75, 60.0)
    assert room.enter(Guest("a", "m", "other", 20, 0.0)) is None
    assert room.enter(Guest("b", "m", "many", 70, 10.0)) is None
    assert room.enter(Guest("c", "n", "many", 6, 10.0)) == "share"
    assert (room.seconds_until_room(20.0), room.seconds_until_room(20.0, "many")) == (40, 50)
    assert room.enter(Guest("d", "m", "third", 10, 20.0)) is None
    room.leave("b")
    assert room.enter(Guest("c", "n", "many", 6, 20.0)) is None


def test_a_room_of_no_seconds_is_closed() -> None:
    room = WaitingRoom(100, 75, 0.0)
    assert not room.is_open
    assert room.enter(Guest("a", "m", "me", 1, 0.0)) == "full"


def test_who_waits_goes_on_when_the_model_is_served_in_the_order_of_arrival() -> None:
    room = WaitingRoom(100, 75, 60.0)
    for name, model in (("b", "m"), ("a", "m"), ("c", "other")):
        room.enter(Guest(name, model, "me", 1, 0.0))
    assert [one.id for one in room.go_on(lambda model: model == "other")] == ["b", "a"]
    assert (len(room), room.held_bytes) == (1, 1)


def test_who_waited_too_long_is_late_and_the_first_to_go_says_when_there_is_room() -> None:
    room = WaitingRoom(100, 75, 60.0)
    room.enter(Guest("a", "m", "me", 1, 0.0))
    room.enter(Guest("b", "m", "me", 1, 10.0))
    assert room.late(59.9) == []
    assert room.seconds_until_room(59.9) == 1
    assert room.seconds_until_room(20.0) == 40
    assert [one.id for one in room.late(60.0)] == ["a"]
    assert [one.id for one in room.everybody()] == ["b"]
    assert (len(room), room.held_bytes) == (0, 0)


@given(st.data())
def test_each_request_leaves_once_by_one_way_and_the_bytes_add_up(data: st.DataObject) -> None:
    room = WaitingRoom(500, 375, 20.0)
    inside: dict[str, Guest] = {}
    served: set[str] = set()
    now = 0.0
    for index in range(data.draw(st.integers(1, 50))):
        now += data.draw(st.floats(0, 8))
        match data.draw(st.sampled_from(["enter", "leave", "serve", "lose", "look"])):
            case "enter":
                model, owner = (data.draw(st.sampled_from(names)) for names in ("mn", "ab"))
                guest = Guest(str(index), model, owner, data.draw(st.integers(0, 300)), now)
                whole = guest.body_bytes + sum(one.body_bytes for one in inside.values())
                own = whole - sum(one.body_bytes for one in inside.values() if one.owner != owner)
                refusal = "full" if whole > 500 else "share" if own > 375 else None
                assert room.enter(guest) == refusal
                if refusal is None:
                    inside[guest.id] = guest
            case "leave" if inside:
                gone = inside.pop(data.draw(st.sampled_from(sorted(inside))))
                room.leave(gone.id)
            case "serve":
                served.add(data.draw(st.sampled_from("mn")))
            case "lose":
                served.clear()
            case _:
                out = room.go_on(lambda model: model not in served)
                assert out == [one for one in inside.values() if one.model in served]
                late = room.late(now)
                assert all(now - one.since >= 20.0 for one in late)
                for one in (*out, *late):
                    del inside[one.id]
                assert all(now - one.since < 20.0 for one in inside.values())
        assert room.held_bytes == sum(one.body_bytes for one in inside.values()) <= 500
        assert len(room) == len(inside)
