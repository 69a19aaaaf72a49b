#!/usr/bin/env bash
# Process 1 of new namespaces: sandbox.sh PAUSE [HOSTNAME FOLDER]. With the last two it becomes a node, for which the
# system's folders are empty, cgroups begin at its own, and the kernel's settings look as a kubelet wants them.
set -euo pipefail
pause=$1

read -r pid _ </proc/self/stat # as the host counts, while its /proc is still here
mount -t proc proc /proc
ip link set lo up

if [ $# -gt 1 ]; then
    hostname=$2 folder=$3
    echo "$hostname" >/proc/sys/kernel/hostname
    mount --make-rshared /

    # The kernel's settings belong to the whole machine, but for the network's. A kubelet that reads what it would write
    # writes nothing.
    mount --bind /proc/sys /proc/sys
    mount --bind /proc/sys/net /proc/sys/net
    while read -r name value; do
        [ -e "/proc/sys/$name" ] || continue
        file=$folder/sysctl-$(basename "$name")
        echo "$value" >"$file"
        mount --bind "$file" "/proc/sys/$name"
    done <<'SETTINGS'
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
SETTINGS
    mount -o remount,bind,ro /proc/sys
    echo 1 >/proc/sys/net/ipv4/ip_forward
    [ ! -e /proc/sys/net/bridge/bridge-nf-call-iptables ] || echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables

    controllers=$(awk '$3 == "cgroup" { print $2, $4 }' /proc/self/mounts)
    mount -t sysfs sysfs /sys
    mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
    while read -r mounted options; do
        name=$(basename "$mounted")
        mkdir -p "/sys/fs/cgroup/$name"
        case $options in
        *name=*) mount -t cgroup -o "none,$(grep -o 'name=[^,]*' <<<"$options")" cgroup "/sys/fs/cgroup/$name" ;;
        *) mount -t cgroup -o "$name" cgroup "/sys/fs/cgroup/$name" ;;
        esac
    done <<<"$controllers"

    for hidden in /run /var/lib /var/log; do
        mount -t tmpfs -o mode=755 tmpfs "$hidden"
    done
    mkdir -p /run/netns /var/lib/cni /var/lib/kubelet /var/log/containers /var/log/pods
fi

echo "$pid"
exec >/dev/null
exec "$pause"
