"""Clusters by name, by file, and by looking at this machine."""

from __future__ import annotations

import json

import pytest

import bigmodel
from bigmodel.clusters import DEVICES, document
from bigmodel.errors import InvalidClusterError, UnknownNameError, UsageError
from bigmodel.observe import probe


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "name"),
    [
        ("8xH100-80GB", 1, 8, "H100-80GB"),
        ("4x8xA100-40GB", 4, 8, "A100-40GB"),
        ("H100:8", 1, 8, "H100-80GB"),
        ("h100-80gb", 1, 1, "H100-80GB"),
        ("2xh200", 1, 2, "H200-141GB"),
        ("2xT4", 1, 2, "T4-16GB"),
    ],
)
def test_names(text, nodes, devices, name):
    cluster = bigmodel.cluster(text)
    assert (cluster.num_nodes, cluster.node.count) == (nodes, devices)
    assert cluster.device.name == name
    assert cluster.world == nodes * devices


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0xH100", "0 is no number of devices"),
        ("-1xH100", "-1 is no number of devices"),
        ("2x3xH100:4", "more than two counts"),
        ("8 H100", "it must name devices"),
        ("", "it must name devices"),
        ("2x2xcpu", "use 4xcpu"),
        ("0xcpu", "0 is no number of devices"),
    ],
)
def test_impossible_names(text, words):
    with pytest.raises(InvalidClusterError, match=words):
        bigmodel.cluster(text)


def test_an_ambiguous_name_says_which():
    with pytest.raises(UnknownNameError) as caught:
        bigmodel.cluster("8xa100")
    assert "did you mean 'A100-40GB' or 'A100-80GB'?" in str(caught.value)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownNameError) as caught:
        bigmodel.cluster("8xH1000-80GB")
    assert "did you mean 'H100-80GB'?" in str(caught.value)
    assert all(name in str(caught.value) for name in (*DEVICES.names(), "cpu"))


def test_a_file_there_and_back(tmp_path):
    cluster = bigmodel.cluster("2x8xH100")
    path = document.save(cluster, tmp_path / "mine.json")
    assert bigmodel.cluster(path) == bigmodel.cluster(str(path)) == cluster
    assert bigmodel.cluster(cluster) is cluster


def test_wrong_files_name_every_field(tmp_path):
    path = document.save(bigmodel.cluster("H100"), tmp_path / "mine.json")
    data = json.loads(path.read_text())
    data["node"]["count"] = "many"
    del data["node"]["device"]["memory"]
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidClusterError) as caught:
        bigmodel.cluster(path)
    assert "node.count" in str(caught.value)
    assert "node.device.memory" in str(caught.value)
    path.write_text("{")
    with pytest.raises(InvalidClusterError):
        bigmodel.cluster(path)
    with pytest.raises(InvalidClusterError, match="cannot read the cluster file"):
        bigmodel.cluster("no/such.json")


def test_devices_that_cannot_exist(tmp_path):
    path = document.save(bigmodel.cluster("H100"), tmp_path / "mine.json")
    data = json.loads(path.read_text())
    data["node"]["device"]["memory"] = 0
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidClusterError, match="memory"):
        bigmodel.cluster(path)


def test_what_is_no_cluster():
    with pytest.raises(UsageError, match="is no cluster"):
        bigmodel.cluster(8)  # pyright: ignore[reportArgumentType]


def test_cores_are_measured():
    cluster = bigmodel.cluster("2xcpu")
    device = cluster.device
    assert cluster.world == 2
    assert device.kind == "cpu"
    assert device.efficiency == device.bandwidth_efficiency == 1.0
    assert 1e8 < device.peaks["float32"] < 1e14
    assert 1e8 < device.bandwidth < 1e12
    assert 1e-8 < device.launch_seconds < 1e-3
    assert 2 * device.memory <= cluster.node.host_memory


def test_a_job_without_gpus_shares_the_cores(monkeypatch):
    monkeypatch.setattr(probe.torch.cuda, "device_count", lambda: 0)
    asked = []
    monkeypatch.setattr(probe, "cpu_cluster", asked.append)
    probe.probe_cluster()
    probe.probe_cluster(4)
    assert asked == [1, 4]


def test_a_job_with_gpus(monkeypatch):
    monkeypatch.setattr(probe.torch.cuda, "device_count", lambda: 8)
    memory = 81_559 * 2**20
    monkeypatch.setattr(probe, "_first_gpu", lambda: ("NVIDIA H100 80GB HBM3", memory))
    assert probe.probe_cluster().world == 8
    assert probe.probe_cluster(2).node.count == 2
    cluster = probe.probe_cluster(16)
    assert (cluster.num_nodes, cluster.node.count) == (2, 8)
    assert cluster.device.memory == memory
    with pytest.raises(InvalidClusterError, match="evenly"):
        probe.probe_cluster(12)


GIB = 2**30


@pytest.mark.parametrize(
    ("driver", "memory", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 80 * GIB, "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", 40 * GIB, "A100-40GB"),
        ("Tesla V100-SXM2-16GB", 16_160 * 2**20, "V100-16GB"),
        ("Tesla T4", 15_360 * 2**20, "T4-16GB"),
        ("NVIDIA L4", 23_034 * 2**20, "L4-24GB"),
        ("NVIDIA L40S", 46_068 * 2**20, "L40S-48GB"),
        ("NVIDIA RTX A6000", 49_140 * 2**20, "A6000-48GB"),
        ("NVIDIA GeForce RTX 4090", 24_564 * 2**20, "RTX4090-24GB"),
        ("NVIDIA H200", 143_771 * 2**20, "H200-141GB"),
    ],
)
def test_names_of_drivers(driver, memory, name):
    assert probe.match_device(driver, memory).device.name == name


@pytest.mark.parametrize("driver", ["NVIDIA H100 PCIe", "NVIDIA TITAN V", "H100 NVL"])
def test_gpus_that_no_table_has(driver):
    with pytest.raises(InvalidClusterError, match="write a cluster file"):
        probe.match_device(driver, 81_559 * 2**20)
