"""Values that the chart is rendered with, each set for a reason."""

from __future__ import annotations

from typing import Any

EVERYTHING: dict[str, Any] = {
    "commonLabels": {"team": "search"},
    "image": {"registry": "registry.example/medha", "pullSecrets": ["registry"]},
    "admission": {
        "level": "baseline",
        "hostPaths": ["/"],
        "writableHostPaths": ["/var/cache/medha-models"],
        "serviceAccounts": ["model-reader"],
    },
    "operator": {
        "replicas": 2,
        "clusterWide": True,
        "routers": [{"name": "other-router", "namespace": "elsewhere"}],
        "env": [{"name": "A", "value": "b"}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
        "serviceAccountAnnotations": {"e": "f"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"operator": "Exists"}],
        "priorityClassName": "system-cluster-critical",
    },
    "router": {
        "env": [{"name": "A", "value": "b"}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
        "serviceAccountAnnotations": {"e": "f"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
        ],
        "tls": {"secretName": "llm-tls"},
        "waitingRoom": {"seconds": 300},
        "apiKeys": {"secretName": "llm-keys", "key": "clients.yaml"},
        "service": {"type": "LoadBalancer", "port": 80, "annotations": {"g": "h"}},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "3600"},
            "hosts": ["llm.example"],
            "tls": [{"hosts": ["llm.example"], "secretName": "llm-tls"}],
        },
        "httpRoute": {
            "enabled": True,
            "annotations": {"i": "j"},
            "parentRefs": [{"name": "gateway", "namespace": "gateways"}],
            "hostnames": ["llm.example"],
            "backendTls": {"hostname": "llm.example", "caConfigMap": "llm-ca"},
        },
        "trustedProxies": ["10.0.0.0/8", "2001:db8::1"],
    },
    "scaling": {
        "prometheusAddress": "http://prometheus.monitoring:9090",
        "deployments": [
            {"name": "chat", "maxReplicas": 8},
            {"name": "code", "namespace": "team-a", "model": "org/code", "minReplicas": 2, "maxReplicas": 4},
        ],
    },
    "traces": {
        "endpoint": "http://collector.monitoring:4318",
        "ratio": 0.25,
        "headersSecret": {"name": "collector", "key": "headers"},
    },
    "networkPolicy": {
        "clientsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}],
        "metricsFrom": [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        ],
    },
    "monitoring": {
        "monitors": True,
        "labels": {"release": "kube-prometheus-stack"},
        "dashboards": True,
        "rules": {
            "enabled": True,
            "labels": {"team": "search"},
            "runbooks": "https://docs.example/runbooks",
        },
    },
}

WITHIN_NAMESPACES: dict[str, Any] = {
    "crds": {"install": False},
    "rbac": {"nodes": False, "aggregate": False},
    "admission": {"enabled": False},
    "operator": {"namespaces": ["team-a"]},
}
"""What somebody may install who has no rights in the cluster as a whole."""

TABLE: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "two namespaces": {"operator": {"namespaces": ["team-a", "team-b"]}},
    "every namespace": {"operator": {"clusterWide": True}},
    "within namespaces": WITHIN_NAMESPACES,
    "operator alone": {"router": {"enabled": False}},
    "router alone": {"operator": {"enabled": False}, "crds": {"install": False}},
    "nothing but definitions": {"operator": {"enabled": False}, "router": {"enabled": False}},
    "roles made elsewhere": {"rbac": {"create": False, "aggregate": False}},
    "images by digest": {
        "operator": {"image": {"digest": f"sha256:{'0' * 64}"}},
        "router": {"image": {"tag": "1.2.3"}},
        "worker": {
            "image": {"repository": "registry.example/worker", "tag": "cpu"},
            "gpuImage": {"digest": f"sha256:{'1' * 64}"},
        },
    },
    "another name": {"fullnameOverride": "serving"},
    "routers by demand": {"router": {"autoscaling": {"enabled": True}}},
    "replicas by an external metric": {
        "scaling": {"by": "hpa", "deployments": [{"name": "chat", "minReplicas": 1, "maxReplicas": 8}]}
    },
    "one router": {"router": {"replicas": 1}},
    "no user of ours": {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}},
    "no policies": {"networkPolicy": {"enabled": False}},
    "nothing judged": {"admission": {"enabled": False}},
    "definitions that go": {"crds": {"keep": False}},
    "an Ingress for any host": {"router": {"ingress": {"enabled": True, "hosts": ["*"]}}},
    "a pool of routers": {
        "router": {
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
            "inferencePool": {
                "enabled": True,
                "annotations": {"k": "l"},
                "endpointPicker": {"name": "picker"},
            },
        }
    },
    "TLS up to routers by authorities that everybody knows": {
        "router": {
            "tls": {"secretName": "llm-tls"},
            "httpRoute": {
                "enabled": True,
                "parentRefs": [{"name": "gateway"}],
                "backendTls": {"hostname": "llm.example"},
            },
        }
    },
    "a stopped router": {"router": {"replicas": 0, "leaveSeconds": 0}},
    "monitoring of the operator": {
        "router": {"enabled": False},
        "monitoring": {"monitors": True, "rules": {"enabled": True, "objective": 0.999}},
    },
}
