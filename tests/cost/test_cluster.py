"""Devices and clusters: published numbers, curves against published bandwidths, a user's own file, errors."""

import pytest

from plait.cost.cluster import Curve, Interval, roofline_s
from plait.cost.cluster_catalogue import find_cluster, find_device, shipped_devices
from plait.errors import ConfigError

MIB = 2**20
LAB = """
name = "lab"
num_nodes = 2
devices_per_node = 4
device = "h100"
[change]
memory_bytes = 94e9
price_per_hour = [2.1, "our contract"]
matmul_share = [0.4, 0.6, 0.75]
"""


def test_every_value_of_every_device_has_a_source():
    for device in shipped_devices().values():
        assert all(len(source) > 10 for source in device.sources.values()), device.name
        assert "memory_bytes" in device.sources
        assert device.matmul_share.low <= device.matmul_share.typical <= device.matmul_share.high <= 1


def test_crossover_batches_are_the_published_ones():
    # F b / (2 BW), in bf16.
    published = {"A100": 153, "H100": 295, "H200": 206, "B200": 281, "MI300X": 247, "L40S": 419, "RTX-4090": 164}
    for name, batch in {**published, "TPU-v5p": 166}.items():
        assert find_device(name).crossover_batch() == pytest.approx(batch, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "kind", "size", "bus"),
    [
        # Bus bandwidth in GB/s of all-reduces, stas00/ml-engineering network/README.md.
        ("A100", "scale_up", 1 * MIB, 18),
        ("A100", "scale_up", 8 * MIB, 110),
        ("A100", "scale_up", 2**34, 234.9),
        ("H200", "scale_up", 1 * MIB, 40),
        ("H200", "scale_up", 8 * MIB, 155),
        ("H200", "scale_up", 32 * MIB, 276),
        ("H200", "scale_up", 2**34, 367.6),
        ("B200", "scale_up", 2**34, 680),
        ("MI300X", "scale_up", 2**34, 312.9),
        ("B200", "network", 16 * MIB, 0.125 * 50),
        ("B200", "network", 512 * MIB, 0.63 * 50),
        ("B200", "network", 2**34, 37),
    ],
)
def test_curves_give_the_published_bandwidths(name, kind, size, bus):
    device = find_device(name)
    curve = (device.scale_up if kind == "scale_up" else device.network).curve
    assert curve.rate(size) / 1e9 == pytest.approx(bus, rel=0.25)
    assert curve.rate(size, "low") <= curve.rate(size) <= curve.rate(size, "high")


def test_best_products_are_the_published_ones():
    # MAMF in TFLOP/s: the highest of the interval, at a size without end.
    for name, rate in (("A100", 271.2), ("H100", 794.5), ("B200", 1745), ("GB200", 1822), ("MI300X", 668)):
        assert find_device(name).matmul().rate(1e18, "high") / 1e12 == pytest.approx(rate, rel=0.01)


def test_a_curve_is_a_latency_and_a_rate():
    curve = Curve(100.0, Interval(0.4, 0.5, 0.6), 10.0)
    assert curve.rate(10) == 25
    assert curve.seconds(10) == pytest.approx(10 / 25)
    assert curve.seconds(0) == 10 / 50
    assert curve.seconds(10, "high") < curve.seconds(10) < curve.seconds(10, "low")
    device = find_device("H100")
    assert device.matmul().seconds(0) == pytest.approx(3e-6)
    assert device.memory.seconds(0) == pytest.approx(3e-6)
    products, traffic = roofline_s(device, 1e12, 1e9, num_operators=10)
    assert products == pytest.approx(1e12 / (989e12 * 0.642) + 10 * 3e-6)
    assert traffic == pytest.approx(1e9 / (3.35e12 * 0.8) + 10 * 3e-6)


def test_spellings():
    assert (find_cluster("8xH100").num_nodes, find_cluster("8xH100").devices_per_node) == (1, 8)
    cluster = find_cluster("4x8xh200")
    assert (cluster.num_devices, cluster.device.name, cluster.price_per_hour) == (32, "H200", 128.0)
    assert cluster.link(8) is cluster.device.scale_up
    assert cluster.link(9) is cluster.device.network
    rack = find_cluster("18x4xGB200")
    assert rack.scale_up_size == 72
    assert rack.link(72) is rack.device.scale_up
    assert find_cluster("2x4xGB200").scale_up_size == 8
    assert find_cluster("cpu").num_devices == 1
    assert find_cluster("cpu").price_per_hour is None
    assert find_cluster("8xH100").num_cpu_cores == 112


def test_a_users_own_file(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(LAB)
    cluster = find_cluster(str(path))
    assert (cluster.name, cluster.num_devices, cluster.price_per_hour) == ("lab", 8, 2.1 * 8)
    assert cluster.device.memory_bytes == 94e9
    assert cluster.device.flop_per_s["bf16"] == 989e12
    assert cluster.device.matmul_share == Interval(0.4, 0.6, 0.75)
    assert cluster.device.sources["price_per_hour"] == "our contract"
    assert cluster.device.sources["memory_bytes"] == "given by the user"
    assert "ml-engineering" in cluster.device.sources["memory_bytes_per_s"]


def test_what_is_wrong_is_said_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"Nearest: .*H100"):
        find_cluster("8xH1000")
    with pytest.raises(ConfigError, match="0 nodes"):
        find_cluster("0x8xH100")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_cluster(str(tmp_path / "none.toml"))
    path = tmp_path / "wrong.toml"
    path.write_text("name = ")
    with pytest.raises(ConfigError, match="not TOML"):
        find_cluster(str(path))
    path.write_text(
        'nodes = 2\ndevices_per_node = 0\ndevice = "H100"\n[change]\nmemory_byte = 1\nmatmul_share = [0.9, 0.5, 1]\n'
    )
    with pytest.raises(ConfigError) as caught:
        find_cluster(str(path))
    assert {violation.where for violation in caught.value.violations} == {
        "cluster.nodes",
        "cluster.num_nodes",
        "cluster.devices_per_node",
        "device.memory_byte",
        "device.matmul_share",
    }
    assert "Did you mean memory_bytes?" in str(caught.value)
    path.write_text("num_nodes = 1\ndevices_per_node = 1\n[change]\nmemory_bytes = 1e9\n")
    with pytest.raises(ConfigError, match="bf16_flop_per_s is missing"):
        find_cluster(str(path))
    with pytest.raises(ConfigError, match="no rate for fp8"):
        find_device("A100").peak_flop_per_s("fp8")
