{{/* The engine's container of mode sidecar: the chart's ports, probes and limits, then the operator's. */}}
{{- define "warmroute.engine" -}}
{{- $ports := list -}}
{{- range $n, $port := .Values.engines.httpPorts -}}
{{- $ports = append $ports (dict "name" (ternary "engine" (printf "engine-%d" $n) (eq $n 0)) "containerPort" (int $port)) -}}
{{- end -}}
{{- range $n, $port := .Values.engines.eventPorts -}}
{{- $ports = append $ports (dict "name" (printf "kv-%d" (int $port)) "containerPort" (int $port)) -}}
{{- end -}}
{{- $asks := dict "path" "/health" "port" "engine" -}}
{{- $engine := dict
      "name" "engine"
      "ports" $ports
      "startupProbe" (dict "httpGet" $asks "periodSeconds" 2 "failureThreshold" 150)
      "readinessProbe" (dict "httpGet" $asks "periodSeconds" 5 "timeoutSeconds" 3)
      "livenessProbe" (dict "httpGet" $asks "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6)
      "resources" (dict "requests" (dict "cpu" "500m" "memory" "512Mi") "limits" (dict "memory" "1Gi"))
      "securityContext" (include "warmroute.confined" . | fromYaml) -}}
{{- /* Other pods' routers have requests here: it ends after the router beside it was drained. */ -}}
{{- $_ := set $engine "lifecycle" (dict "preStop" (dict "exec" (dict "command" (list "python" "-c" (printf "import time; time.sleep(%d)" (int (add .Values.preStopSeconds 5))))))) -}}
{{- /* Not merge: it would take a false of the operator's for a value that is missing. */ -}}
{{- toYaml (mergeOverwrite $engine (deepCopy .Values.sidecar.engine.container)) -}}
{{- end -}}
