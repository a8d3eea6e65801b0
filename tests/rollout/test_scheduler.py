import random

from plait.rollout.scheduler import Request, Scheduler


def requests(count):
    return [Request(str(i), (1,), i, 4) for i in range(count)]


def ids(scheduler):
    return [running.request.id for running in scheduler.running]


def test_a_freed_slot_is_taken_at_once_and_slots_stay_dense():
    scheduler = Scheduler(3)
    scheduler.submit(requests(5))
    assert [(slot, r.id) for slot, r in scheduler.admit()] == [(0, "0"), (1, "1"), (2, "2")]
    assert scheduler.release([0]) == [(2, 0)]
    assert ids(scheduler) == ["2", "1"]
    assert [(slot, r.id) for slot, r in scheduler.admit()] == [(2, "3")]


def test_several_freed_at_once():
    scheduler = Scheduler(6)
    scheduler.submit(requests(6))
    scheduler.admit()
    assert scheduler.release([5, 0, 3]) == [(4, 0)]
    assert ids(scheduler) == ["4", "1", "2"]


def test_random_traffic_serves_everybody_once():
    generator = random.Random(0)
    scheduler, served = Scheduler(4), []
    scheduler.submit(requests(50))
    while not scheduler.is_idle:
        scheduler.admit()
        before = ids(scheduler)
        freed = generator.sample(range(len(before)), generator.randint(1, len(before)))
        moves = scheduler.release(freed)
        served += [before[slot] for slot in freed]
        assert sorted(ids(scheduler)) == sorted(set(before) - {before[slot] for slot in freed})
        for source, target in moves:
            assert ids(scheduler)[target] == before[source]
    assert sorted(served, key=int) == [str(i) for i in range(50)]
