"""Clusters as data: devices, links, the seconds of collectives."""

from bigmodel.clusters.collectives import Group as Group
from bigmodel.clusters.collectives import group as group
from bigmodel.clusters.collectives import send_seconds as send_seconds
from bigmodel.clusters.devices import DEVICES as DEVICES
from bigmodel.clusters.machine import Cluster as Cluster
from bigmodel.clusters.machine import Device as Device
from bigmodel.clusters.machine import Link as Link
from bigmodel.clusters.machine import Node as Node
