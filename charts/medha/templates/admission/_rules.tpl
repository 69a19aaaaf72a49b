{{/* A list of strings as CEL writes it. */}}
{{- define "medha.celList" -}}
{{ toJson . | replace "\"" "'" }}
{{- end -}}

{{/* Variables of files/admission.yaml that follow from `pod`, `filled` and `source`, and from values. */}}
{{- define "medha.judgedVariables" -}}
{{- $readable := list -}}
{{- range .Values.admission.hostPaths }}{{ $readable = append $readable (trimSuffix "/" .) }}{{ end -}}
{{- $writable := list -}}
{{- range .Values.admission.writableHostPaths }}{{ $writable = append $writable (trimSuffix "/" .) }}{{ end -}}
{{- range $below := concat $readable $writable }}
{{- range $above := $writable }}
{{- if hasPrefix (printf "%s/" $above) $below }}
{{- fail (printf "admission: %s lies below %s, which is one of writableHostPaths: a pod could put a link to any directory in its place; leave one of them out" $below (default "/" $above)) }}
{{- end }}
{{- end }}
{{- end -}}
- name: accounts
  expression: {{ include "medha.celList" (concat (list "" "default") .Values.admission.serviceAccounts) | quote }}
- name: readable
  expression: {{ include "medha.celList" $readable | quote }}
- name: writable
  expression: {{ include "medha.celList" $writable | quote }}
- name: own
  expression: "variables.filled ? ['worker', 'fetch-model'] : []"
- name: containers
  expression: >-
    optional.ofNonZeroValue(variables.pod.?containers.orValue(null)).orValue([])
    + optional.ofNonZeroValue(variables.pod.?initContainers.orValue(null)).orValue([])
    + optional.ofNonZeroValue(variables.pod.?ephemeralContainers.orValue(null)).orValue([])
- name: volumes
  expression: optional.ofNonZeroValue(variables.pod.?volumes.orValue(null)).orValue([])
- name: hosted
  expression: >-
    variables.source + variables.volumes.filter(v, v.?hostPath.?path.hasValue() && !variables.writable.exists(r,
    v.hostPath.path == r || v.hostPath.path == r + '/')).map(v, v.?name.orValue(''))
{{- end -}}

{{/* End of every refusal. */}}
{{- define "medha.unless" -}}
, unless the namespace is exempt by admission.namespaceSelector (release {{ .Release.Name }} in {{ .Release.Namespace }})
{{- end -}}

{{/* The rules of files/admission.yaml at the level that is set. */}}
{{- define "medha.validations" -}}
{{- $rules := .Files.Get "files/admission.yaml" | fromYaml -}}
{{- $unless := include "medha.unless" . -}}
{{- $levels := ternary (list "always" "baseline") (list "always" "baseline" "restricted") (eq .Values.admission.level "baseline") -}}
{{- range $level := $levels }}
{{- $why := eq $level "restricted" | ternary ", or admission.level be baseline" "" -}}
{{- $of := get $rules $level }}
{{- range $of.pod }}
- expression: {{ printf "!(%s)" .bad | quote }}
  messageExpression: {{ printf "variables.at + '.%s %s%s%s'" .field .text $why $unless | quote }}
  message: {{ printf "%s %s%s%s" .field .text $why $unless | quote }}
  reason: Forbidden
{{- end }}
{{- range $list, $one := dict "containers" "c" "volumes" "v" }}
{{- range default list (get $of $list) }}
- expression: {{ printf "!variables.%s.exists(%s, %s)" $list $one .bad | quote }}
  messageExpression: {{ printf "variables.at + '.%s ' + variables.%s.filter(%s, %s).map(%s, %s.?name.orValue('')).join(', ') + ': %s %s%s%s'" $list $list $one .bad $one $one .field .text $why $unless | quote }}
  message: {{ printf "%s: %s %s%s%s" $list .field .text $why $unless | quote }}
  reason: Forbidden
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
