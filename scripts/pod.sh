#!/usr/bin/env bash
# Emulate a pod of host servers on one Linux machine with network namespaces. Needs root; installs nothing.
#
#   pod.sh up N            start N hosts (host1 .. hostN) and an operator's machine on a private switch
#   pod.sh down            remove the pod with all its processes
#   pod.sh op CMD...       run CMD on the operator's machine, which has the ssh key of the hosts and runs `ray up`; in the
#                          current folder if the hosts share it, else in /
#   pod.sh on I CMD...     run CMD on host I, without ssh
#   pod.sh kill I          power loss of host I: its peers see closed connections
#   pod.sh boot I          start host I again; only the home folder of its disk is kept
#   pod.sh wipe I          loss of the disk of host I, which is down: it has an empty one when it is started again
#   pod.sh cut I           network loss of host I: its peers get no packets
#   pod.sh mend I          restore the network of host I
#   pod.sh speed RATE      limit every link in both directions, as in `speed 1gbit`; `speed off` removes the limit
#   pod.sh status          print one line per host
#
# Every host has its own network, mount, uts, ipc and pid namespaces, an sshd on its own address, and a disk that is an
# overlay of this machine's disk. Hosts share only the folders of POD_SHARE. The switch is a namespace, too: the pod
# does not change this machine's network and has no connection to it.
#
#   POD_NAME=pod           name of the pod; pods of different names can run in parallel, even with equal addresses
#   POD_NET=10.77.0        first three bytes of the addresses: operator .1, hosts .11 .12 ...
#   POD_SHARE=A:B          folders that all hosts share (default: this checkout)
#   POD_VENV=DIR           the Python environment of all hosts (default: that of `python3` here)
#   POD_HOSTS=debian       what a host's name resolves to: debian (127.0.1.1, as on most servers), full (all
#                          names resolve on all hosts) or none
#   POD_DISK=2g POD_SHM=1g limits of a host's disk (kept in memory) and of its /dev/shm
#   POD_ENV="A=b C=d"      extra environment: at `up` for every shell of the hosts, else for this `op` or `on`
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NAME=${POD_NAME:-pod}
NET=${POD_NET:-10.77.0}
RUN=/run/raypod-pod/$NAME # keys and pids; not visible to the hosts
SHARE=${POD_SHARE:-$(dirname "$HERE")}
VENV=${POD_VENV:-$(python3 -c 'import sys; print(sys.prefix)')}
if ! PYTHON=$("$VENV/bin/python" -c 'import sys; print(sys.base_prefix)' 2>&1); then
    echo "pod.sh: no Python environment at $VENV; set POD_VENV, as in: sudo POD_VENV=\$PWD/.venv $0 $*" >&2
    exit 1
fi
HOSTS=${POD_HOSTS:-debian}
DISK=${POD_DISK:-2g}
SHM=${POD_SHM:-1g}
READY_TENTHS=300 # start timeout of a host, in tenths of a second

die() { echo "pod.sh: $*" >&2; exit 1; }

check_machine() {
    local missing=() tool
    [ "$(id -u)" = 0 ] || die "needs root (network namespaces, mounts)"
    for tool in ip:iproute2 tc:iproute2 unshare:util-linux nsenter:util-linux sshd:openssh-server \
        ssh-keygen:openssh-client rsync:rsync; do
        PATH=$PATH:/usr/sbin:/sbin command -v "${tool%%:*}" >/dev/null || missing+=("${tool##*:}")
    done
    [ ${#missing[@]} = 0 ] || die "missing packages; install them: apt-get install --no-install-recommends ${missing[*]}"
}

# An id is a number, or "op" for the operator's machine.
address_of() { if [ "$1" = op ]; then echo "$NET.1"; else echo "$NET.$((10 + $1))"; fi; }
namespace_of() { if [ "$1" = op ]; then echo "$NAME-op"; else echo "$NAME-h$1"; fi; }
hostname_of() { if [ "$1" = op ]; then echo operator; else echo "host$1"; fi; }
ids() { find "$RUN" -mindepth 1 -maxdepth 1 -type d -printf '%f\n' 2>/dev/null | sort -V; }
init_of() { cat "$RUN/$1/pid" 2>/dev/null || echo 0; } # pid of a host's init in this machine's pid namespace
is_up() { [ -d "/proc/$(init_of "$1")" ] && [ "$(init_of "$1")" != 0 ]; }
must_exist() { [ -d "$RUN/${1:-none}" ] || die "no host ${1:-} in the pod $NAME; hosts: $(ids | tr '\n' ' ')"; }

# Create a network namespace whose eth0 is connected to the switch.
plug() {
    local id=$1 namespace address
    namespace=$(namespace_of "$id") address=$(address_of "$id")
    ip netns add "$namespace"
    ip -n "$NAME-sw" link add "p$id" type veth peer name eth0 netns "$namespace"
    ip -n "$NAME-sw" link set "p$id" master br0 up
    ip -n "$namespace" link set lo up
    ip -n "$namespace" addr add "$address/24" dev eth0
    ip -n "$namespace" link set eth0 up
    # Ray determines its address from the default route. The gateway does not exist.
    ip -n "$namespace" route add default via "$NET.254" dev eth0
}

boot() {
    local id=$1 folder=$RUN/$1
    mkdir -p "$folder/mnt"
    rm -f "$folder/pid" "$folder/ready"
    env POD_RUN="$RUN" POD_SHARE="$SHARE" POD_VENV="$VENV" POD_HOSTS="$HOSTS" POD_DISK="$DISK" POD_SHM="$SHM" \
        POD_PYTHON="$PYTHON" POD_ENV="${POD_ENV:-}" \
        ip netns exec "$(namespace_of "$id")" \
        setsid unshare --mount --uts --ipc --pid --fork --kill-child -- \
        bash "$HERE/pod/host-init.sh" "$id" "$(hostname_of "$id")" "$(address_of "$id")" "$folder" \
        >"$folder/console.log" 2>&1 </dev/null &
    echo $! >"$folder/outer"
    disown # otherwise bash reports its exit
}

wait_until_up() {
    local id=$1 folder=$RUN/$1 outer init
    outer=$(cat "$folder/outer")
    for _ in $(seq "$READY_TENTHS"); do
        if [ -e "$folder/ready" ]; then
            init=$(tr -d ' ' <"/proc/$outer/task/$outer/children") # unshare's only child is the init
            echo "$init" >"$folder/pid"
            return
        fi
        [ -d "/proc/$outer" ] || die "$(hostname_of "$id") exited during its start: $(cat "$folder/console.log")"
        sleep 0.1
    done
    die "$(hostname_of "$id") did not start within $((READY_TENTHS / 10)) s: $(cat "$folder/console.log")"
}

up() {
    local number=$1 id
    [[ $number =~ ^[1-9][0-9]?$ ]] || die "up N: N must be 1 to 99, not '$number'"
    check_machine
    [ ! -e "$RUN" ] || die "the pod $NAME is already running (pod.sh down removes it)"
    trap '[ $? = 0 ] || down' EXIT
    mkdir -p -m 700 "$(dirname "$RUN")" "$RUN"
    ssh-keygen -q -t ed25519 -N '' -C "$NAME" -f "$RUN/id"
    ssh-keygen -q -t ed25519 -N '' -C "$NAME" -f "$RUN/hostkey"
    echo "127.0.0.1 localhost" >"$RUN/hosts"
    if [ "$HOSTS" = full ]; then
        for id in op $(seq "$number"); do echo "$(address_of "$id") $(hostname_of "$id")" >>"$RUN/hosts"; done
    fi
    ip netns add "$NAME-sw"
    ip -n "$NAME-sw" link set lo up
    ip -n "$NAME-sw" link add br0 type bridge forward_delay 0
    ip -n "$NAME-sw" link set br0 up
    for id in op $(seq "$number"); do plug "$id" && boot "$id"; done
    for id in op $(seq "$number"); do wait_until_up "$id"; done
    status
}

down() {
    local id namespace
    for id in $(ids); do
        is_up "$id" && kill -9 "$(init_of "$id")" 2>/dev/null || true
        kill -9 "$(cat "$RUN/$id/outer" 2>/dev/null)" 2>/dev/null || true
    done
    for id in $(ids); do
        for _ in $(seq 100); do is_up "$id" && sleep 0.1 || break; done
    done
    for namespace in $(ip netns list | awk '{print $1}' | grep -E "^$NAME-(op|sw|h[0-9]+)$" || true); do
        ip netns del "$namespace"
    done
    rm -rf --one-file-system "$RUN"
}

wipe() {
    local id=$1
    for _ in $(seq 50); do is_up "$id" && sleep 0.1 || break; done # a host that was just killed
    ! is_up "$id" || die "$(hostname_of "$id") is running"
    rm -rf --one-file-system "$RUN/$id/home"
}

is_shared() { # is_shared FOLDER
    local shared all
    IFS=: read -ra all <<<"$SHARE"
    for shared in "${all[@]}"; do
        case "$1/" in "${shared%/}"/*) return 0 ;; esac
    done
    return 1
}

on() {
    local id=$1 folder=/
    shift
    [ "$id" != op ] || ! is_shared "$PWD" || folder=$PWD
    must_exist "$id"
    is_up "$id" || die "$(hostname_of "$id") is not running"
    [ $# -gt 0 ] || set -- bash
    # shellcheck disable=SC2086  # POD_ENV is a list
    exec nsenter -t "$(init_of "$id")" -n -m -u -i -p -r -w -- env -C "$folder" -i HOME=/root USER=root LOGNAME=root \
        SHELL=/bin/bash TERM="${TERM:-dumb}" LANG=C.UTF-8 RAY_USAGE_STATS_ENABLED=0 ${POD_ENV:-} \
        PATH="$VENV/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" "$@"
}

# A token bucket filter on both ends of every link limits both directions.
speed() {
    local rate=$1 id
    for id in $(ids); do
        if [ "$rate" = off ]; then
            ip netns exec "$NAME-sw" tc qdisc del dev "p$id" root 2>/dev/null || true
            ip netns exec "$(namespace_of "$id")" tc qdisc del dev eth0 root 2>/dev/null || true
        else
            ip netns exec "$NAME-sw" tc qdisc replace dev "p$id" root tbf rate "$rate" burst 256kb latency 20ms
            ip netns exec "$(namespace_of "$id")" tc qdisc replace dev eth0 root tbf rate "$rate" burst 256kb latency 20ms
        fi
    done
}

status() {
    local id state
    for id in $(ids); do
        state=down
        is_up "$id" && state="up, $(pgrep --ns "$(init_of "$id")" --nslist pid -c . || true) processes"
        echo "$(hostname_of "$id") $(address_of "$id") $state"
    done
}

case "${1:-}" in
up) up "${2:-}" ;;
down) down ;;
op) shift && on op "$@" ;;
on) [ $# -gt 1 ] || die "on I CMD..."; shift && on "$@" ;;
kill) must_exist "${2:-}" && kill -9 "$(init_of "$2")" ;;
boot) must_exist "${2:-}"; ! is_up "$2" || die "$(hostname_of "$2") is already running"; boot "$2"; wait_until_up "$2" ;;
wipe) must_exist "${2:-}" && wipe "$2" ;;
cut) must_exist "${2:-}" && ip -n "$NAME-sw" link set "p$2" down ;;
mend) must_exist "${2:-}" && ip -n "$NAME-sw" link set "p$2" up ;;
speed) [ $# = 2 ] || die "speed RATE|off"; speed "$2" ;;
status) status ;;
*) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit 2 ;;
esac
