"""What strains a host by two looks at it, and how it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from keepstep.core.host_sample import Descriptors, Disk, Fabric, HostSample, Interface, Strain, StrainKind
from keepstep.core.strains import A_LOT, HOLD_S, find_strains, percent, settle, size, strains_of_host

GB = 10**9
QUIET = HostSample(
    at=0.0,
    unix_s=1000.0,
    processors=4,
    cpu_s=400.0,
    cpu_idle_s=100.0,
    cpu_stolen_s=0.0,
    own_cpu_s=50.0,
    group_cpu_s=50.0,
    throttled_s=0.0,
    cpu_waited_s=0.0,
    memory_waited_s=0.0,
    io_waited_s=0.0,
    load=1.0,
    memory_used_bytes=10 * GB,
    memory_limit_bytes=64 * GB,
    memory_available_bytes=100 * GB,
    memory_total_bytes=128 * GB,
    oom_kills=3,
    disks=(Disk("/tmp", 100 * GB, 50 * GB, 1000, 500),),
    disk_errors=(("vda", 7),),
    descriptors=(Descriptors("agent", 100, 1024),),
    thermal_slowdowns=4,
    temperature_c=60.0,
    temperature_max_c=100.0,
    interfaces=(Interface("eth0", 1000, 1, 5),),
    tcp_sent=1000,
    tcp_resent=10,
    fabrics=(Fabric("efa rdmap1", (("rx_drops", 100), ("retrans_pkts", 50), ("tx_pkts", 10_000))),),
)


def later(**changes: object) -> HostSample:
    """Ten seconds later: forty seconds of four processors, half of them idle, half the job's own."""
    usual = {"at": 10.0, "unix_s": 1010.0, "cpu_s": 440.0, "cpu_idle_s": 120.0, "own_cpu_s": 70.0, "group_cpu_s": 70.0}
    return replace(QUIET, **{**usual, **changes})


def test_a_quiet_host_is_not_strained():
    assert strains_of_host(QUIET, later()) == ()


CASES = [
    ({"throttled_s": 12.0}, ("cpu held back by its quota 38 % of the time",)),  # 12 withheld of 32 wanted
    ({"throttled_s": 12.0, "group_cpu_s": None, "own_cpu_s": 58.0}, ("cpu held back by its quota 60 % of the time",)),
    ({"throttled_s": 0.9}, ()),
    ({"throttled_s": 0.2, "group_cpu_s": 50.2}, ()),  # wants next to nothing
    ({"cpu_stolen_s": 4.8}, ("cpu taken by other guests 12 %",)),
    ({"cpu_stolen_s": 1.2}, ()),
    ({"cpu_idle_s": 102.0, "cpu_waited_s": 3.0}, ("cpu taken by other processes 45 %",)),
    ({"cpu_idle_s": 102.0, "cpu_waited_s": 3.0, "cpu_stolen_s": 2.0},
     ("cpu taken by other guests 5 %", "cpu taken by other processes 40 %")),
    ({"cpu_idle_s": 102.0, "cpu_waited_s": 0.5}, ()),  # nobody waits
    ({"cpu_idle_s": 102.0, "cpu_waited_s": 9.0, "own_cpu_s": 87.0}, ()),  # for whom it waits are its own
    ({"cpu_idle_s": 120.0, "own_cpu_s": 60.0, "cpu_waited_s": 3.0}, ()),  # there are others, and room for them
    ({"cpu_idle_s": 102.0, "cpu_waited_s": None, "load": 9.0}, ("cpu taken by other processes 45 %",)),
    ({"cpu_idle_s": 102.0, "cpu_waited_s": None, "load": 3.0}, ()),
    ({"memory_waited_s": 0.9}, ("waits for memory 9 % of the time",)),
    ({"io_waited_s": 3.0}, ("waits for io 30 % of the time",)),
    ({"io_waited_s": 1.0}, ()),
    ({"memory_used_bytes": 63 * GB + GB // 2}, ("500 MB of the container's memory left",)),
    ({"memory_used_bytes": 65 * GB}, ("0 B of the container's memory left",)),
    ({"memory_available_bytes": 900_000_000}, ("900 MB of the machine's memory left",)),
    ({"memory_available_bytes": 900_000_000, "memory_used_bytes": None}, ("900 MB of the machine's memory left",)),
    ({"memory_limit_bytes": GB, "memory_used_bytes": GB // 2, "memory_available_bytes": 800_000_000},
     ("800 MB of the machine's memory left",)),  # the container's half GB is half of what it may have
    ({"oom_kills": 4}, ("1 process killed for want of memory",)),
    ({"oom_kills": 5}, ("2 processes killed for want of memory",)),
    ({"disks": (Disk("/tmp", 100 * GB, 180_000_000),)}, ("disk /tmp has 180 MB left",)),
    ({"disks": (Disk("/dev/shm", 64_000_000, 60_000_000),)}, ()),
    ({"disks": (Disk("/dev/shm", 64_000_000, 0),)}, ("disk /dev/shm has 0 B left",)),
    ({"disks": (Disk("/tmp", 100 * GB, 50 * GB, 1000, 9),)}, ("disk /tmp has room for 9 more files",)),
    ({"disks": (Disk("/tmp", 100 * GB, 50 * GB, 0, 0),)}, ()),
    ({"disks": (Disk("/out", 100 * GB, 1, read_only=True),)}, ("disk /out can only be read",)),
    ({"disks": (Disk("/fsx", silent_s=15.0),)}, ("disk /fsx has not answered for 15 s",)),
    ({"disks": (Disk("/fsx", silent_s=5.0),)}, ()),
    ({"disk_errors": (("vda", 8), ("vdb", 9))}, ("file system vda has 1 new error",)),
    ({"unix_s": 1006.8}, ("clock was set by -3.2 s",)),
    ({"unix_s": 1010.1}, ()),
    ({"unix_s": None}, ()),
    ({"descriptors": (Descriptors("worker", 900, 1024),)}, ("900 of 1024 file descriptors open (worker)",)),
    ({"thermal_slowdowns": 12}, ("8 thermal slowdowns",)),
    ({"thermal_slowdowns": 5}, ("1 thermal slowdown",)),
    ({"temperature_c": 97.0}, ("97 °C where 100 are too much",)),
    ({"temperature_c": 97.0, "temperature_max_c": None}, ()),
    ({"interfaces": (Interface("eth0", 2000, 3, 25),)}, ("network eth0: 2 errors, 20 drops",)),
    ({"interfaces": (Interface("eth0", 100_000, 1, 25),)}, ()),
    ({"interfaces": (Interface("eth1", 2000, 3, 25),)}, ()),  # since it came
    ({"tcp_sent": 5660, "tcp_resent": 110}, ("tcp retransmits 2.1 %",)),
    ({"tcp_sent": 1010, "tcp_resent": 20}, ()),
    ({"fabrics": (Fabric("efa rdmap1", (("rx_drops", 112), ("tx_pkts", 99_000))),)}, ("efa rdmap1: 12 rx drops",)),
    ({"fabrics": (Fabric("efa rdmap1", (("rx_drops", 103),)),)}, ()),
    ({"fabrics": (Fabric("efa rdmap1", (("retrans_pkts", 250), ("tx_pkts", 15_000))),)},
     ("efa rdmap1: 200 retrans pkts",)),
    ({"fabrics": (Fabric("efa rdmap1", (("retrans_pkts", 250), ("tx_pkts", 1_500_000))),)}, ()),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "wanted"), CASES)
def test_what_strains_a_host_is_told_with_its_figure(changes, wanted):
    assert strains_of_host(QUIET, later(**changes)) == wanted


def test_a_link_that_went_down_once_is_told():
    before = replace(QUIET, fabrics=(Fabric("infiniband mlx5_0", (("link_downed", 2),)),))
    after = later(fabrics=(Fabric("infiniband mlx5_0", (("link_downed", 3),)),))
    assert strains_of_host(before, after) == ("infiniband mlx5_0: 1 link downed",)


def test_of_one_sample_alone_only_what_is_short_is_known():
    one = later(disks=(Disk("/tmp", 100 * GB, 5),), throttled_s=99.0, oom_kills=99)
    assert strains_of_host(one, one) == ("disk /tmp has 5 B left",)


def test_what_is_not_known_strains_nothing():
    assert strains_of_host(HostSample(0.0), HostSample(10.0)) == ()
    assert strains_of_host(HostSample(0.0), later(at=10.0)) == strains_of_host(QUIET, HostSample(10.0)) == ()


COUNTERS = (
    "cpu_s", "cpu_idle_s", "cpu_stolen_s", "own_cpu_s", "group_cpu_s", "throttled_s", "cpu_waited_s",
    "memory_waited_s", "io_waited_s", "oom_kills", "thermal_slowdowns", "tcp_sent", "tcp_resent",
)  # fmt: skip
readings = st.one_of(st.none(), st.integers(0, 1 << 40))
samples = st.builds(
    HostSample,
    at=st.integers(0, 1000),
    unix_s=st.one_of(st.none(), st.integers(0, 1 << 31)),
    memory_used_bytes=readings,
    memory_limit_bytes=readings,
    memory_available_bytes=readings,
    memory_total_bytes=readings,
    disks=st.tuples(st.builds(Disk, st.just("/tmp"), *[st.integers(0, 1 << 50)] * 4)),
    descriptors=st.tuples(st.builds(Descriptors, st.just("agent"), st.integers(0, 9999), st.integers(1, 9999))),
    interfaces=st.tuples(st.builds(Interface, st.just("eth0"), *[st.integers(0, 1 << 40)] * 3)),
    **dict.fromkeys(COUNTERS, readings),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(samples, samples)
def test_whatever_counters_say_shares_are_shares(before, after):
    """Counters may begin anew, and the looks at them are not all at one moment."""
    for strain in find_strains(before, after):
        assert strain.text and "\n" not in strain.text and len(strain.text) < 120
        if "%" in strain.text:
            shown = float(strain.text.split(" %")[0].split()[-1])
            assert 0 < shown <= 100 and strain.figure > 0


@given(st.floats(0, 3))
def test_a_share_has_two_digits(share):
    shown = percent(share).removesuffix(" %")
    assert abs(float(shown) - min(100.0, 100 * share)) <= (0.5 if share >= 0.0995 else 0.05) + 1e-9
    assert len(shown) <= 3


@pytest.mark.parametrize(
    ("size_bytes", "wanted"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (180_400_000, "180 MB"), (2 * GB, "2.0 GB")],
)
def test_sizes_in_words(size_bytes, wanted):
    assert size(size_bytes) == wanted


# --- telling ---------------------------------------------------------------------------------------------------------


def waits(figure: float, kind: StrainKind = StrainKind.IO_WAIT, what: str = "") -> Strain:
    return Strain(kind, what, figure, f"{kind.value} {what} {figure:g}")


def told_over(looks: list[tuple[Strain, ...]], every_s: float = 5.0) -> list[tuple[str, ...]]:
    """What is told after each look."""
    told, texts = (), []
    for number, found in enumerate(looks):
        told = settle(told, found, number * every_s)
        texts.append(tuple(each.strain.text for each in told))
    return texts


def test_what_is_new_is_told_at_once_in_the_order_of_the_kinds():
    found = (waits(0.3), waits(5, StrainKind.CPU_STEAL), waits(1, StrainKind.DISK_SHORT, "/b"))
    texts = told_over([found[:1], (*found, waits(1, StrainKind.DISK_SHORT, "/a"))])
    assert texts[0] == ("io_wait  0.3",)
    assert texts[1] == ("cpu_steal  5", "io_wait  0.3", "disk_short /a 1", "disk_short /b 1")


def test_what_comes_and_goes_is_told_once():
    seen, unseen = (waits(0.3),), ()
    texts = told_over([seen, unseen, unseen, seen, unseen, unseen, unseen, unseen, unseen, unseen])
    assert set(texts[:9]) == {("io_wait  0.3",)}
    assert texts[9] == ()  # 30 s after it was last seen


def test_a_figure_is_told_anew_when_it_changed_by_a_lot_and_some_time_passed():
    texts = told_over([(waits(0.3),), *[(waits(0.9),)] * 7, (waits(0.8),), *[(waits(0.7),)] * 9])
    assert texts[5] == ("io_wait  0.3",) and texts[6] == ("io_wait  0.9",)
    assert set(texts[6:]) == {("io_wait  0.9",)}


def test_a_figure_that_wavers_stands():
    texts = told_over([(waits(0.2),), (waits(0.6),)] * 20)
    assert set(texts) == {("io_wait  0.2",)}


def test_a_clock_that_is_set_back_and_forth_is_told_of_both():
    texts = told_over([(waits(-3.0),), *[(waits(3.0),)] * 7])
    assert texts[0] != texts[-1]


@example([0.3, *[None] * 6, 0.3, *[None] * 6])
@given(st.lists(st.one_of(st.none(), st.floats(0.05, 1)), max_size=60))
def test_however_it_flaps_it_is_told_at_most_twice_in_half_a_minute(figures):
    texts = told_over([() if figure is None else (waits(figure),) for figure in figures])
    changes = [at for at, (one, other) in enumerate(zip([(), *texts], texts, strict=False)) if one != other]
    assert all(third - first >= HOLD_S / 5.0 for first, third in zip(changes, changes[2:], strict=False))


@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=60))
def test_what_is_told_is_never_far_from_what_is_for_long(figures):
    texts = told_over([(waits(figure),) for figure in [*figures, *[figures[-1]] * 7]])
    shown = float(texts[-1][0].split()[-1])
    assert figures[-1] / A_LOT <= shown * 1.001 and shown <= figures[-1] * A_LOT * 1.001
