{{/* The beginning of all names. */}}
{{- define "warmroute.base" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Deployment, Service, ConfigMap and all else of the routers. */}}
{{- define "warmroute.name" -}}
{{- include "warmroute.base" . }}-{{ get (dict "central" "router" "sidecar" "sidecar" "picker" "picker") .Values.mode -}}
{{- end -}}

{{- define "warmroute.labels" -}}
app: {{ include "warmroute.name" . }}
app.kubernetes.io/name: warmroute
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .Values.mode }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "warmroute.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end -}}

{{- define "warmroute.pool" -}}
{{- .Values.picker.pool.name | default (include "warmroute.base" .) -}}
{{- end -}}

{{- define "warmroute.enginesNamespace" -}}
{{- .Values.discovery.namespace | default .Release.Namespace -}}
{{- end -}}

{{/* Sources of workers, as JSON. */}}
{{- define "warmroute.sources" -}}
{{- $d := .Values.discovery -}}
{{- $options := ternary (printf ",%s" $d.options) "" (ne $d.options "") -}}
{{- $ns := include "warmroute.enginesNamespace" . -}}
{{- $sources := $d.sources -}}
{{- range $d.services -}}{{- $sources = append $sources (printf "kubernetes:%s/%s%s" $ns . $options) -}}{{- end -}}
{{- range include "warmroute.pools" . | fromJsonArray -}}
{{- $sources = append $sources (printf "inferencepool:%s/%s%s" $ns . $options) -}}
{{- end -}}
{{- if eq .Values.mode "sidecar" -}}
{{- $sources = append $sources (printf "dns:%s-engines:%v%s" (include "warmroute.base" .) (first .Values.engines.httpPorts) $options) -}}
{{- end -}}
{{- toJson $sources -}}
{{- end -}}

{{/* InferencePools that are followed, as JSON. */}}
{{- define "warmroute.pools" -}}
{{- $own := ternary (list (include "warmroute.pool" .)) list (eq .Values.mode "picker") -}}
{{- toJson (concat $own .Values.discovery.inferencePools | uniq) -}}
{{- end -}}

{{/* Whether the routers ask the Kubernetes API: "true" or nothing. */}}
{{- define "warmroute.asksKubernetes" -}}
{{- if or .Values.discovery.services (include "warmroute.pools" . | fromJsonArray) -}}true{{- end -}}
{{- end -}}

{{/* router.yaml: what the chart sets, then the operator's. */}}
{{- define "warmroute.config" -}}
{{- $c := dict "host" "0.0.0.0" "port" 8080 "admin_host" "0.0.0.0" "admin_port" 8081 -}}
{{- $_ := set $c "discovery" (include "warmroute.sources" . | fromJsonArray) -}}
{{- if .Values.keys.admin -}}
{{- $_ := set $c "admin_keys_file" "/etc/warmroute-keys/admin/keys" -}}
{{- else -}}
{{- $_ := set $c "admin_open" true -}}
{{- end -}}
{{- if .Values.keys.client -}}{{- $_ := set $c "api_keys_file" "/etc/warmroute-keys/client/keys" -}}{{- end -}}
{{- if eq .Values.redis.mode "own" -}}
{{- $_ := set $c "state" (printf "redis://%s-redis:6379" (include "warmroute.base" .)) -}}
{{- else if and (eq .Values.redis.mode "given") .Values.redis.url -}}
{{- $_ := set $c "state" .Values.redis.url -}}
{{- end -}}
{{- if .Values.tls.client -}}
{{- $_ := set $c "tls" (dict "cert" "/etc/warmroute-tls/client/tls.crt" "key" "/etc/warmroute-tls/client/tls.key") -}}
{{- end -}}
{{- if eq .Values.mode "picker" -}}
{{- $_ := set $c "picker" (dict "host" "0.0.0.0" "port" (int .Values.picker.port) "health_port" (int .Values.picker.healthPort)) -}}
{{- if .Values.tls.picker -}}
{{- $_ := set $c "picker_tls" (dict "cert" "/etc/warmroute-tls/picker/tls.crt" "key" "/etc/warmroute-tls/picker/tls.key") -}}
{{- end -}}
{{- end -}}
{{- if .Values.tokenizer.volume -}}
{{- $_ := set $c "tokenizer" (list "/etc/warmroute-tokenizer" .Values.tokenizer.folder | compact | join "/") -}}
{{- end -}}
{{- $c = mergeOverwrite $c (deepCopy .Values.config) -}}
{{- with include "warmroute.scaledModels" . | fromJsonArray -}}
{{- $waiting := $c.waiting | default dict -}}
{{- $_ := set $c "waiting" (set $waiting "models" (concat ($waiting.models | default list) . | uniq)) -}}
{{- end -}}
{{- toYaml $c -}}
{{- end -}}

{{/* The pod's volumes beside ConfigMap, Secrets and /tmp, as JSON. */}}
{{- define "warmroute.volumes" -}}
{{- $found := list -}}
{{- with .Values.tokenizer.volume -}}{{- $found = append $found (merge (dict "name" "tokenizer") .) -}}{{- end -}}
{{- $found = concat $found .Values.extraVolumes -}}
{{- if eq .Values.mode "sidecar" -}}{{- $found = concat $found .Values.sidecar.engine.volumes -}}{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* A container of the operator's that runs before the router, confined like all others. */}}
{{- define "warmroute.before" -}}
{{- $confined := dict "securityContext" (include "warmroute.confined" . | fromYaml) -}}
{{- toYaml (mergeOverwrite $confined (deepCopy .)) -}}
{{- end -}}

{{/* Secrets that are mounted: name of the volume, Secret, folder. */}}
{{- define "warmroute.mounted" -}}
{{- $found := list -}}
{{- if .Values.keys.client -}}{{- $found = append $found (dict "name" "client-keys" "secret" .Values.keys.client "path" "/etc/warmroute-keys/client") -}}{{- end -}}
{{- if .Values.keys.admin -}}{{- $found = append $found (dict "name" "admin-keys" "secret" .Values.keys.admin "path" "/etc/warmroute-keys/admin") -}}{{- end -}}
{{- if .Values.tls.client -}}{{- $found = append $found (dict "name" "client-tls" "secret" .Values.tls.client "path" "/etc/warmroute-tls/client") -}}{{- end -}}
{{- if and .Values.tls.picker (eq .Values.mode "picker") -}}{{- $found = append $found (dict "name" "picker-tls" "secret" .Values.tls.picker "path" "/etc/warmroute-tls/picker") -}}{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* What all of our containers may do. */}}
{{- define "warmroute.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The router's container. */}}
{{- define "warmroute.router" -}}
name: router
image: {{ include "warmroute.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [warmroute]
args: [serve, --config, /etc/warmroute/router.yaml]
{{- $secret := and (eq .Values.redis.mode "given") .Values.redis.secret.name }}
{{- if or $secret .Values.extraEnv }}
env:
  {{- if $secret }}
  - {name: WARMROUTE_STATE, valueFrom: {secretKeyRef: {name: {{ .Values.redis.secret.name }}, key: {{ .Values.redis.secret.key }}}}}
  {{- end }}
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
ports:
  - {name: http, containerPort: 8080}
  - {name: admin, containerPort: 8081}
  {{- if eq .Values.mode "picker" }}
  - {name: grpc-ext-proc, containerPort: {{ .Values.picker.port }}}
  - {name: grpc-health, containerPort: {{ .Values.picker.healthPort }}}
  {{- end }}
{{- $https := ternary ", scheme: HTTPS" "" (ne .Values.tls.client "") }}
startupProbe: {httpGet: {path: /health, port: http{{ $https }}}, periodSeconds: 1, failureThreshold: 60}
{{- if eq .Values.mode "picker" }}
readinessProbe: {grpc: {port: {{ .Values.picker.healthPort }}, service: readiness}, periodSeconds: 2, timeoutSeconds: 2, failureThreshold: 1}
{{- else }}
readinessProbe: {httpGet: {path: /ready, port: http{{ $https }}}, periodSeconds: 2, timeoutSeconds: 2, failureThreshold: 1}
{{- end }}
# A restart helps: the event loop, or the relay, hangs. Clients cannot fill this port.
livenessProbe: {httpGet: {path: /health, port: admin}, periodSeconds: 5, timeoutSeconds: 2, failureThreshold: 3}
lifecycle:
  preStop:
    exec:
      # Not ready at once; served for a while more, until all balancers know.
      command:
        - python
        - -c
        - |
          import time, urllib.request as u
          try:
              u.urlopen(u.Request("http://127.0.0.1:8081/drain", method="POST"), timeout=5)
          except OSError as error:  # it wants a key: Kubernetes takes the pod out all the same
              print(error)
          time.sleep({{ .Values.preStopSeconds }})
resources:
  {{- toYaml .Values.resources | nindent 2 }}
volumeMounts:
  - {name: config, mountPath: /etc/warmroute, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  {{- range include "warmroute.mounted" . | fromJsonArray }}
  - {name: {{ .name }}, mountPath: {{ .path }}, readOnly: true}
  {{- end }}
  {{- if .Values.tokenizer.volume }}
  - {name: tokenizer, mountPath: /etc/warmroute-tokenizer, readOnly: true}
  {{- end }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
securityContext:
  {{- include "warmroute.confined" . | nindent 2 }}
{{- end -}}

{{/* A model's name for NOTES.txt, where values tell it: of an option, or of the engine's flags. */}}
{{- define "warmroute.model" -}}
{{- $option := regexFind "(^|,)model=[^,]+" .Values.discovery.options -}}
{{- $container := .Values.sidecar.engine.container -}}
{{- $words := ternary (concat ($container.command | default list) ($container.args | default list)) list (eq .Values.mode "sidecar") -}}
{{- $flag := regexFind "--(served-model-name|model-name)[ =][^ ]+" (join " " $words) -}}
{{- if $option -}}{{- splitList "model=" $option | last -}}
{{- else if $flag -}}{{- regexSplit "[ =]" $flag 2 | last -}}
{{- else -}}{{- ternary "warmroute-timed" "MODEL" (has "--timed" $words) -}}
{{- end -}}
{{- end -}}

{{/* A port of network policies for each of a list. */}}
{{- define "warmroute.ports" -}}
{{- $ports := list -}}
{{- range . }}{{- $ports = append $ports (printf "{port: %v}" .) -}}{{- end -}}
[{{ join ", " $ports }}]
{{- end -}}
