#!/usr/bin/env bash
# Init process of a host of an emulated pod (see pod.sh): mounts its disk, changes root, runs sshd and reaps orphans.
set -euo pipefail
id=$1 name=$2 address=$3 folder=$4
root=$folder/mnt/root

mount --make-rprivate /
hostname "$name"
# The disk: an overlay of this machine's disk with a size limit.
mount -t tmpfs -o "size=$POD_DISK,mode=755" tmpfs "$folder/mnt"
mkdir "$folder/mnt/upper" "$folder/mnt/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/mnt/upper,workdir=$folder/mnt/work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o "size=$POD_SHM,mode=1777" tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o "size=$POD_DISK,mode=1777" tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
# The home folder is not part of the overlay and persists after a reboot: Ray stores its token and state there, and an
# overlay whose lower folder changes cannot be read.
mkdir -p -m 700 "$folder/home"
mount --bind "$folder/home" "$root/root"
IFS=:
folders=$POD_SHARE:$POD_VENV:$POD_PYTHON # the base Python of the environment may be in a home folder
for shared in $folders; do
    case "$shared" in /usr | /usr/*) continue ;; esac
    mkdir -p "$root$shared"
    mount --bind "$shared" "$root$shared"
done
unset IFS

cp "$POD_RUN/hosts" "$root/etc/hosts"
[ "$POD_HOSTS" != debian ] || echo "127.0.1.1 $name" >>"$root/etc/hosts"
echo "$name" >"$root/etc/hostname"
: >"$root/etc/resolv.conf"
mkdir -p -m 700 "$root/root/.ssh"
install -m 600 "$POD_RUN/id.pub" "$root/root/.ssh/authorized_keys"
[ "$id" != op ] || install -m 600 "$POD_RUN/id" "$root/root/.ssh/id_ed25519"
# The Python environment is on the PATH of every shell, login or not.
cat >"$root/root/.bashrc" <<END
export PATH=$POD_VENV/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export RAY_USAGE_STATS_ENABLED=0 $POD_ENV
END
echo '. ~/.bashrc' >"$root/root/.profile"
install -m 600 "$POD_RUN/hostkey" "$root/etc/ssh/pod_hostkey"
cat >"$root/etc/ssh/pod_sshd_config" <<END
ListenAddress $address
Port 22
HostKey /etc/ssh/pod_hostkey
PidFile /run/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 100
MaxSessions 100
Subsystem sftp /usr/lib/openssh/sftp-server
END
mkdir -p "$root/run/sshd" "$folder/mnt/root/mnt/old"
cd "$root"
pivot_root . mnt/old
cd /
export HOME=/root
unset "${!POD_@}"
exec </dev/null
[ "$id" = op ] || /usr/sbin/sshd -f /etc/ssh/pod_sshd_config -E /var/log/sshd.log
: >"/mnt/old$folder/ready" # the old root is unmounted next
umount -l /mnt/old
while :; do
    sleep 3600 &
    wait $! || true
done
