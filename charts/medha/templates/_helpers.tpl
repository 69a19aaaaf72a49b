{{- define "medha.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "medha.operatorName" -}}
{{ include "medha.fullname" . }}-operator
{{- end -}}

{{/* By this name replicas refer to the router; its Deployment, its Service and its Secrets carry it. */}}
{{- define "medha.routerName" -}}
{{ include "medha.fullname" . }}-router
{{- end -}}

{{/* Labels that select: {root, component}. */}}
{{- define "medha.selector" -}}
app.kubernetes.io/name: medha
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of pods: {root, component}. None of them changes with the chart's version alone, which restarts nothing. */}}
{{- define "medha.podLabels" -}}
{{ include "medha.selector" . }}
app.kubernetes.io/part-of: medha
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of every object: {root, component}. */}}
{{- define "medha.labels" -}}
{{ include "medha.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Name of an image: {root, image}. */}}
{{- define "medha.image" -}}
{{- with .root.Values.image.registry -}}{{ trimSuffix "/" . }}/{{- end -}}
{{- .image.repository -}}
{{- if .image.digest -}}@{{ .image.digest }}{{- else -}}:{{ .image.tag | default .root.Chart.AppVersion }}{{- end -}}
{{- end -}}

{{/* Address of an alert's runbook: [base address, alert]. */}}
{{- define "medha.runbook" -}}
{{ printf "%s/%s.md" (trimSuffix "/" (index . 0)) (index . 1) | quote }}
{{- end -}}

{{/* Security context of every container. */}}
{{- define "medha.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Ports of the cluster's DNS, in a NetworkPolicy: it sees the ports of pods, and those of OpenShift's DNS listen on 5353. */}}
{{- define "medha.dnsPorts" -}}
{{- range list 53 5353 }}
- {protocol: UDP, port: {{ . }}}
- {protocol: TCP, port: {{ . }}}
{{- end }}
{{- end -}}

{{/* Where pods may and should run: {root, of, component}. */}}
{{- define "medha.placement" -}}
{{- with .of.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
  {{- if .of.affinity }}
  {{- toYaml .of.affinity | nindent 2 }}
  {{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "medha.selector" . | nindent 14 }}
  {{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Routers whose keys the operator makes, as JSON: this release's own and those of operator.routers. */}}
{{- define "medha.routers" -}}
{{- $routers := .Values.operator.routers -}}
{{- if .Values.router.enabled -}}
{{- $routers = prepend $routers (dict "name" (include "medha.routerName" .) "namespace" .Release.Namespace) -}}
{{- end -}}
{{- toJson $routers -}}
{{- end -}}

{{/* Namespaces that the operator manages, as JSON; an empty list stands for all. */}}
{{- define "medha.namespaces" -}}
{{- if and .Values.operator.clusterWide .Values.operator.namespaces -}}
{{- fail "operator.clusterWide is set, and operator.namespaces too: leave one of them out" -}}
{{- end -}}
{{- $own := .Values.operator.clusterWide | ternary list (list .Release.Namespace) -}}
{{- toJson (default $own .Values.operator.namespaces) -}}
{{- end -}}

{{/* What the operator reads: medha_operator.operator_settings.OperatorSettings. */}}
{{- define "medha.operatorSettings" -}}
{{- $settings := dict
  "worker_image" (include "medha.image" (dict "root" . "image" .Values.worker.image))
  "gpu_worker_image" (include "medha.image" (dict "root" . "image" .Values.worker.gpuImage))
  "image_pull_policy" .Values.image.pullPolicy
  "namespaces" (include "medha.namespaces" . | fromJsonArray)
  "gang_apis" .Values.operator.gangApis
  "traces_endpoint" (default nil .Values.traces.endpoint)
  "metrics_from" (ternary .Values.networkPolicy.metricsFrom (list) .Values.networkPolicy.enabled)
  "routers" (include "medha.routers" . | fromJsonArray)
  "concurrent_replicas" .Values.operator.concurrentReplicas
  "resync_seconds" .Values.operator.resyncSeconds
  "surge_wait_seconds" .Values.operator.surgeWaitSeconds
  "lease_name" (include "medha.operatorName" .)
  "lease_namespace" .Release.Namespace
  "lease_seconds" .Values.operator.leaseSeconds
-}}
{{- toPrettyJson $settings -}}
{{- end -}}

{{/* What the router reads: medha_process.router_settings.RouterSettings. */}}
{{- define "medha.routerSettings" -}}
{{- with .Values.router -}}
{{- if and $.Values.traces.headersSecret.name (not $.Values.traces.endpoint) -}}
{{- fail "traces.headersSecret.name is set, but no collector: set traces.endpoint too" -}}
{{- end -}}
{{- if gt (int64 (default 0 .waitingRoom.bytes)) (mul 4 .maxBodyBytes) -}}
{{- fail (printf "router.waitingRoom.bytes is %d, more than four times router.maxBodyBytes, %d: lower the one or raise the other" (int64 .waitingRoom.bytes) (int64 .maxBodyBytes)) -}}
{{- end -}}
{{- $settings := dict
  "host" "0.0.0.0"
  "port" 8000
  "metrics_host" "0.0.0.0"
  "metrics_port" 9403
  "control_endpoint" "tcp://0.0.0.0:5700"
  "tokens_endpoint" "tcp://0.0.0.0:5701"
  "key_file" "/etc/medha/keys/router.key"
  "enrolment_file" "/etc/medha/keys/tokens"
  "scratch_directory" "/tmp"
  "models_directory" "/etc/medha/models"
  "api_keys_file" (ternary (printf "/etc/medha/api-keys/%s" .apiKeys.key) nil (ne .apiKeys.secretName ""))
  "tls_certificate_file" (ternary "/etc/medha/tls/tls.crt" nil (ne .tls.secretName ""))
  "tls_key_file" (ternary "/etc/medha/tls/tls.key" nil (ne .tls.secretName ""))
  "max_body_bytes" .maxBodyBytes
  "max_waiting" .maxWaiting
  "waiting_room_seconds" .waitingRoom.seconds
  "waiting_room_bytes" .waitingRoom.bytes
  "replica_start_seconds" $.Values.scaling.startSeconds
  "allowed_hosts" .allowedHosts
  "allowed_origins" .allowedOrigins
  "trusted_proxies" .trustedProxies
  "max_samples" .maxSamples
  "tokenize_processes" .tokenizeProcesses
  "tokenize_threads" .tokenizeThreads
  "join_seconds" .joinSeconds
  "leave_seconds" .leaveSeconds
  "drain_seconds" .drainSeconds
  "log_level" .logLevel
  "traces_endpoint" (default nil $.Values.traces.endpoint)
  "traces_ratio" $.Values.traces.ratio
  "exit_with_parent" false
-}}
{{- toPrettyJson $settings -}}
{{- end -}}
{{- end -}}
